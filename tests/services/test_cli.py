"""The command line: what it says, how it fails, that every command teaches."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from twostroke import __version__
from twostroke.errors import ConfigError, Unavailable
from twostroke.services import configure
from twostroke.services.cli import main
from twostroke.services.describe import COMMAND_FIELDS, SECTIONS, default_text, flag, takes
from twostroke.services.settings import GatewaySettings, UpSettings, WorkerSettings


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("TWOSTROKE_"):
            monkeypatch.delenv(name)


def run(*words: str) -> Result:
    return CliRunner().invoke(main, list(words), prog_name="twostroke")


def commands(group: click.Group = main, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    for name, command in group.commands.items():
        yield (*path, name), command
        if isinstance(command, click.Group):
            yield from commands(command, (*path, name))


COMMANDS = dict(commands())


def test_the_commands() -> None:
    wanted = [
        "up",
        "generate",
        "chat",
        "bench",
        "models",
        "convert",
        "verify",
        "plan",
        "doctor",
        "gateway",
        "prefill",
        "decode",
        "both",
        "health",
        "workers",
        "keys",
    ]
    assert list(main.commands) == wanted
    assert {("models", "pull"), ("models", "list")} <= COMMANDS.keys()
    assert run("--version").output == f"twostroke, version {__version__}\n"


@pytest.mark.parametrize("path", [(), ("models",), ("workers",)], ids=["twostroke", "models", "workers"])
def test_lists_of_commands_are_whole_sentences(path: tuple[str, ...]) -> None:
    listed = run(*path, "--help").output.partition("Commands:")[2]
    assert listed.strip()
    assert "..." not in listed


def test_grpc_keeps_quiet_about_servers_that_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRPC_VERBOSITY", "")
    monkeypatch.delenv("GRPC_VERBOSITY")
    run("health", "127.0.0.1:1")
    assert os.environ["GRPC_VERBOSITY"] == "ERROR"
    monkeypatch.setenv("GRPC_VERBOSITY", "debug")
    run("health", "127.0.0.1:1")
    assert os.environ["GRPC_VERBOSITY"] == "debug"


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_help_teaches(path: tuple[str, ...]) -> None:
    result = run(*path, "--help")
    assert result.exit_code == 0
    assert "Example" in result.output
    assert f"twostroke {' '.join(path)}" in result.output
    assert run(*path, "-h").output == result.output
    for parameter in COMMANDS[path].params:
        if isinstance(parameter, click.Option) and not parameter.hidden:
            assert parameter.help, parameter.name


def test_whoever_asks_a_gateway_takes_its_address_from_the_same_places() -> None:
    askers = {}
    for path, command in COMMANDS.items():
        for parameter in command.params:
            if parameter.name == "address" and isinstance(parameter, click.Option):
                askers[path] = (parameter.envvar, parameter.default, parameter.metavar, parameter.help)
    assert {("generate",), ("chat",), ("bench",), ("workers", "list"), ("workers", "role")} <= askers.keys()
    assert set(askers.values()) == {("TWOSTROKE_ADDRESS", "127.0.0.1:50051", "HOST:PORT", "The gateway.")}


def test_the_workers_of_an_address_that_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWOSTROKE_ADDRESS", "nowhere")
    result = run("workers", "list")
    assert (result.exit_code, result.stderr) == (2, "error: address: got 'nowhere', takes an address, host:port\n")


@pytest.mark.parametrize(
    ("name", "schemas"),
    [
        ("gateway", [GatewaySettings]),
        ("prefill", [WorkerSettings]),
        ("decode", [WorkerSettings]),
        ("both", [WorkerSettings]),
        ("up", [UpSettings, GatewaySettings, WorkerSettings]),
    ],
)
def test_every_setting_is_an_option(name: str, schemas: list[type[GatewaySettings]]) -> None:
    options = {option for parameter in COMMANDS[name,].params for option in parameter.opts}
    wanted = {flag(field) for schema in schemas for field in schema.model_fields if field not in COMMAND_FIELDS}
    left_out = {"--name", "--workers", "--advertise"} if name == "up" else set()
    assert wanted - left_out <= options
    assert not left_out & options


@pytest.mark.parametrize("name", ["prefill", "decode", "both", "up"])
def test_wrong_flags_are_one_line(name: str) -> None:
    result = run(name, "--max-batch", "many")
    assert result.exit_code == 2
    assert result.stderr == "error: max_batch: got 'many', takes a whole number from 1 to 4096 (flag --max-batch)\n"
    assert not result.stdout


def test_wrong_variables_and_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "t.toml"
    path.write_text("[gateway]\nmax_queue = 0\n")
    assert run("gateway", "--config", str(path)).stderr == (
        f"error: max_queue: got 0, takes a whole number from 1 to 1000000 (file {path}, [gateway])\n"
    )
    monkeypatch.setenv("TWOSTROKE_MAX_QUEUE", "x")
    result = run("gateway", "--config", str(path))
    assert (result.exit_code, result.stderr) == (
        2,
        "error: max_queue: got 'x', takes a whole number from 1 to 1000000 (variable TWOSTROKE_MAX_QUEUE)\n",
    )


def test_an_unknown_flag_gets_a_suggestion() -> None:
    result = run("decode", "--max-bach", "1")
    assert result.exit_code == 2
    assert "--max-batch" in result.stderr


def test_a_gateway_needs_workers() -> None:
    result = run("gateway")
    assert result.exit_code == 2
    assert result.stderr.startswith("error: workers: got nothing, takes addresses, host:port,host:port (or let")


def test_up_refuses_before_it_starts() -> None:
    result = run("up", "--decode", "0", "--listen", "127.0.0.1:0")
    assert result.exit_code == 2
    assert result.stderr.startswith("error: decode: got 0, takes at least 1")


@pytest.mark.parametrize(("error", "code"), [(ConfigError("a\nb"), 2), (Unavailable("a\nb"), 1)])
def test_our_errors_have_no_traceback(error: Exception, code: int) -> None:
    @main.command("fails", hidden=True)
    def fails() -> None:
        raise error

    try:
        result = run("fails")
    finally:
        del main.commands["fails"]
    assert (result.exit_code, result.stderr) == (code, "error: a\nerror: b\n")


def test_models(tmp_path: Path) -> None:
    assert "twostroke models pull" in run("models", "list", "--models-dir", str(tmp_path)).output
    assert json.loads(run("models", "list", "--json", "--models-dir", str(tmp_path)).output) == []
    result = run("models", "pull", "no such model", "--models-dir", str(tmp_path))
    assert result.exit_code == 2
    assert "'no such model'" in result.stderr
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"not a gguf")
    result = run("convert", str(broken), str(tmp_path / "out"))
    assert result.exit_code == 2
    assert str(broken) in result.stderr


def test_health_of_nobody() -> None:
    result = run("health", "127.0.0.1:1", "--timeout", "0.5")
    assert (result.exit_code, result.output) == (1, "silent\n")


def test_a_supervisor_that_is_gone() -> None:
    words = [sys.executable, "-m", "twostroke.services.cli", "decode", "--parent", "1073741824"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("error: parent: got 1073741824")


def test_configuration_page_is_up_to_date() -> None:
    root = Path(__file__).parent.parent.parent
    page = (root / "docs" / "configuration.md").read_text(encoding="utf-8")
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import configuration; sys.stdout.write(configuration.document())"
    )
    made = subprocess.run(
        [sys.executable, "-c", code, str(root / "scripts")], capture_output=True, text=True, check=True, cwd=root
    )
    assert made.stdout == page, "stale: make docs"
    for schema in SECTIONS.values():
        assert all(f"| `{name}` |" in page for name in schema.model_fields if name not in COMMAND_FIELDS)


def test_descriptions_of_what_fields_take() -> None:
    fields = WorkerSettings.model_fields
    assert takes(fields["kv_memory"]) == "a size from 1MiB to 16TiB, such as 512MB or 1GiB"
    assert takes(fields["unticketed_share"]) == "a number over 0, up to 1"
    assert takes(fields["models_dir"]) == takes(fields["shm_dir"]) == "a path"
    assert takes(fields["page_size"]) == "one of 16, 32, 64, 128"
    assert takes(fields["gpu_memory"]) == "a share over 0, up to 1, or a size such as 60GiB"
    assert takes(fields["max_batch"]) == "a whole number from 1 to 4096"
    assert default_text(fields["session_buffer_bytes"]) == "4MiB"
    assert {default_text(fields[name]) for name in ("kv_memory", "page_size", "max_batch")} == {"by device"}
    assert default_text(fields["prefix_cache"]) == "true"
    assert default_text(fields["advertise"]) == default_text(fields["models_dir"]) == ""
    assert default_text(GatewaySettings.model_fields["workers"]) == ""


def test_flags_and_variables_of_a_gateway(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the words on the command line to the settings that `serve` gets, without serving."""
    seen = []

    def stop(schema: type[GatewaySettings], flags: dict[str, object], config: Path | None) -> GatewaySettings:
        seen.append(configure.load(schema, flags, config))
        raise ConfigError("far enough")

    monkeypatch.setattr("twostroke.services.commands.serve.load", stop)
    monkeypatch.setenv("TWOSTROKE_DRAIN_S", "3")
    run("gateway", "--workers", "a:1,b:2", "--workers", "c:3", "--max-message-bytes", "1MiB")
    assert seen[0] == GatewaySettings(workers=["a:1", "b:2", "c:3"], max_message_bytes=1 << 20, drain_s=3)
