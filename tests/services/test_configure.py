"""Where settings come from, which source wins, and what a wrong value makes it say."""

import itertools
import logging
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from twostroke.errors import ConfigError
from twostroke.services.configure import flags_of, load, load_up, setting_variables, warn_of_unknown_variables
from twostroke.services.describe import own_fields
from twostroke.services.settings import GatewaySettings, Settings, UpSettings, WorkerSettings


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("TWOSTROKE_"):
            monkeypatch.delenv(name)


def write(folder: Path, text: str) -> Path:
    path = folder / "twostroke.toml"
    path.write_text(text)
    return path


@pytest.mark.parametrize("given_by", list(itertools.product([False, True], repeat=4)))
def test_precedence(given_by: tuple[bool, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    by_flag, by_variable, in_section, at_top = given_by
    text = ('model = "top"\n' if at_top else "") + ('[gateway]\nmodel = "section"\n' if in_section else "")
    if by_variable:
        monkeypatch.setenv("TWOSTROKE_MODEL", "variable")
    flags = {"model": "flag"} if by_flag else {}
    names = [name for name, here in zip(("flag", "variable", "section", "top"), given_by, strict=True) if here]
    settings = load(GatewaySettings, flags, write(tmp_path, text))
    assert settings.model == (names or ["smollm2-135m"])[0]


def test_the_variable_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWOSTROKE_CONFIG", str(write(tmp_path, "[worker]\nmax_batch = 3")))
    assert load(WorkerSettings, {"role": "both"}).max_batch == 3
    other = tmp_path / "other.toml"
    other.write_text("[worker]\nmax_batch = 4")
    assert load(WorkerSettings, {"role": "both"}, other).max_batch == 4


def test_an_empty_variable_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWOSTROKE_MODEL", "")
    monkeypatch.setenv("TWOSTROKE_CONFIG", "")
    assert load(GatewaySettings, {}).model == "smollm2-135m"


def test_lists_and_sizes_of_every_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, '[gateway]\nworkers = ["a:1", "b:2"]\nmax_message_bytes = "2MiB"')
    assert load(GatewaySettings, {}, path).workers == ["a:1", "b:2"]
    assert load(GatewaySettings, {}, path).max_message_bytes == 2 << 20
    monkeypatch.setenv("TWOSTROKE_WORKERS", "c:3,d:4")
    assert load(GatewaySettings, {}, path).workers == ["c:3", "d:4"]
    assert load(GatewaySettings, {"workers": ("e:5", "f:6,g:7")}, path).workers == ["e:5", "f:6", "g:7"]


@pytest.mark.parametrize(
    ("value", "line"),
    [
        ("many", "max_batch: got 'many', takes a whole number from 1 to 4096 (flag --max-batch)"),
        ("0", "max_batch: got '0', takes a whole number from 1 to 4096 (flag --max-batch)"),
        ("9" * 100, f"max_batch: got '{'9' * 76}..., takes a whole number from 1 to 4096 (flag --max-batch)"),
    ],
)
def test_a_wrong_flag(value: str, line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(WorkerSettings, {"role": "both", "max_batch": value})
    assert caught.value.message == line
    assert caught.value.field == "max_batch"


def test_a_wrong_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWOSTROKE_KV_MEMORY", "lots")
    with pytest.raises(ConfigError) as caught:
        load(WorkerSettings, {"role": "both"})
    assert caught.value.message == (
        "kv_memory: got 'lots', takes a size from 1MiB to 16TiB, such as 512MB or 1GiB (variable TWOSTROKE_KV_MEMORY)"
    )


def test_a_wrong_value_in_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, "drain_s = -1\n[worker]\npage_size = 20\nprefix_cache = 3")
    with pytest.raises(ConfigError) as caught:
        load(WorkerSettings, {"role": "both"}, path)
    assert caught.value.message.splitlines() == [
        f"drain_s: got -1, takes a number from 0.1 to 86400 (file {path})",
        f"page_size: got 20, takes one of 16, 32, 64, 128 (file {path}, [worker])",
        f"prefix_cache: got 3, takes true or false (file {path}, [worker])",
    ]


def test_a_wrong_worker_address() -> None:
    with pytest.raises(ConfigError) as caught:
        load(GatewaySettings, {"workers": ("a:1,b",)})
    assert caught.value.message == "workers: got ('a:1,b',), takes addresses, host:port,host:port (flag --workers)"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[worker]\nmax_bach = 1", "max_bach: no such setting (file F, [worker]); did you mean max_batch?"),
        ("[gateway]\nmax_batch = 1", "max_batch: no such setting (file F, [gateway]); it belongs into [worker]"),
        ("max_queue = 1", "max_queue: no such setting (file F); it belongs into [gateway]"),
        ("listen = 'a:1'", "listen: no such setting (file F); it belongs into [gateway] or [worker]"),
        ("[gatewy]\nmax_queue = 1", "gatewy: no such setting (file F); did you mean [gateway]?"),
        ("[up]\nmodel = 'x'", "model: no such setting (file F, [up]); it belongs into the top of the file"),
        ("[worker]\nrole = 'both'", "role: no such setting (file F, [worker])"),
        ("zzzzqqq = 1", "zzzzqqq: no such setting (file F)"),
        ("worker = 3", "worker: got 3, takes a table [worker] (file F)"),
    ],
)
def test_unknown_keys(text: str, message: str, tmp_path: Path) -> None:
    """Also in the tables of other processes: one file serves them all."""
    path = write(tmp_path, text)
    for schema, flags in ((GatewaySettings, {}), (WorkerSettings, {"role": "both"}), (UpSettings, {})):
        with pytest.raises(ConfigError) as caught:
            load(schema, flags, path)  # type: ignore[type-var]
        assert caught.value.message.replace(str(path), "F") == message


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.toml: No such file"):
        load(GatewaySettings, {}, tmp_path / "none.toml")
    with pytest.raises(ConfigError, match="not valid TOML"):
        load(GatewaySettings, {}, write(tmp_path, "model = "))
    (tmp_path / "bytes.toml").write_bytes(b"model = '\xff'")
    with pytest.raises(ConfigError, match="not valid TOML"):
        load(GatewaySettings, {}, tmp_path / "bytes.toml")


def test_the_role_is_the_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWOSTROKE_ROLE", "both")
    assert load(WorkerSettings, {"role": "decode"}).role == "decode"


def test_up_reads_every_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = """
    drain_s = 5
    [gateway]
    listen = "127.0.0.1:7000"
    drain_s = 6
    [worker]
    max_batch = 4
    listen = "127.0.0.1:7001"
    [up]
    decode = 2
    """
    monkeypatch.setenv("TWOSTROKE_PAGE_SIZE", "32")
    monkeypatch.setenv("TWOSTROKE_NAME", "someone")
    flags = {"prefill": "3", "silence_s": "4", "listen": "127.0.0.1:7002", "max_input": "100"}
    up, gateway, worker = load_up(flags, write(tmp_path, text))
    assert (up.prefill, up.decode, up.drain_s, up.silence_s) == (3, 2, 5, 4)
    assert (gateway.listen, gateway.drain_s, gateway.silence_s, gateway.max_input) == ("127.0.0.1:7002", 6, 4, 100)
    assert (worker.max_batch, worker.page_size, worker.drain_s, worker.max_input) == (4, 32, 5, 100)
    assert (worker.listen, worker.advertise, worker.name, gateway.name) == ("127.0.0.1:0", "", "", "gateway")


def test_misspelt_variables_are_named(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("TWOSTROKE_MAX_BACH", "1")
    monkeypatch.setenv("TWOSTROKE_PORT_50051_TCP_ADDR", "10.0.0.1")  # a platform's own
    monkeypatch.setenv("TWOSTROKE_MAX_BATCH", "1")
    with caplog.at_level(logging.WARNING, "twostroke"):
        warn_of_unknown_variables()
    assert [record.getMessage() for record in caplog.records] == [
        "variable TWOSTROKE_MAX_BACH is not a setting; did you mean TWOSTROKE_MAX_BATCH?"
    ]


def test_setting_variables() -> None:
    assert {"TWOSTROKE_CONFIG", "TWOSTROKE_MODEL", "TWOSTROKE_DECODE", "TWOSTROKE_MAX_QUEUE"} <= setting_variables()


def test_own_fields_have_no_shared_ones() -> None:
    assert "model" in own_fields(Settings)
    assert "model" not in own_fields(WorkerSettings)
    assert "role" not in own_fields(WorkerSettings)
    assert list(own_fields(UpSettings)) == ["prefill", "decode", "both", "devices", "ready_s"]


workers = st.fixed_dictionaries(
    {"role": st.sampled_from(["prefill", "decode", "both"])},
    optional={
        "listen": st.sampled_from(["127.0.0.1:1", "[::1]:2", "host:3"]),
        "kv_memory": st.integers(1 << 20, 1 << 44),
        "prefix_cache": st.booleans(),
        "watermark": st.floats(0, 0.5),
        "page_size": st.sampled_from([16, 32, 64, 128]),
        "drain_s": st.floats(0.1, 86_400),
        "model": st.text(st.characters(exclude_categories=["C"]), min_size=1, max_size=20),
        "models_dir": st.sampled_from([None, "/somewhere else", "relative"]),
        "name": st.from_regex(r"[A-Za-z0-9_.\-]{0,64}", fullmatch=True),
    },
)


@given(workers)
@hypothesis_settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_flags_make_the_same_settings_again(values: dict[str, object]) -> None:
    """A supervisor tells its children everything by flags."""
    settings = WorkerSettings.model_validate(values)
    words = flags_of(settings)
    flags: dict[str, object] = {"role": settings.role}
    while words:
        name = words.pop(0).removeprefix("--").replace("-", "_")
        if name == "no_prefix_cache":
            flags["prefix_cache"] = False
        else:
            flags[name] = words.pop(0)
    assert load(WorkerSettings, flags) == settings
