"""The images and the compose file: valid by the compose specification, and made of commands and settings that exist."""

import json
import re
import shlex
from importlib import resources
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from twostroke.services.cli import main
from twostroke.services.configure import load, setting_variables
from twostroke.services.describe import SECTIONS, variable
from twostroke.services.options import given_flags
from twostroke.services.settings import GatewaySettings, WorkerSettings, split_address

FOLDER = Path(__file__).parent.parent / "compose"
DOCKERFILE = (FOLDER / "Dockerfile").read_text()
INSTRUCTIONS = [
    line.strip() for line in re.sub(r"\\\n", " ", re.sub(r"(?m)^#.*\n", "", DOCKERFILE)).splitlines() if line.strip()
]


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    text = (FOLDER / "compose.yaml").read_text()
    resolved = re.sub(r"\$\{[A-Z_]+:-([^}]*)\}", r"\1", text)  # the defaults of its variables
    assert "$" not in resolved
    loaded: dict[str, Any] = yaml.safe_load(resolved)
    return loaded


def parse(arguments: list[str]) -> click.Context:
    """The command line `twostroke ARGUMENTS`, parsed down to its last subcommand, not run."""
    context = main.make_context("twostroke", list(arguments))
    while isinstance(context.command, click.Group):
        rest = [*context._protected_args, *context.args]
        name, command, rest = context.command.resolve_command(context, rest)
        assert command is not None
        context = command.make_context(name, rest, parent=context)
    return context


def test_valid_by_the_specification(compose: dict[str, Any]) -> None:
    pytest.importorskip("check_jsonschema")
    from jsonschema import Draft7Validator

    schemas = resources.files("check_jsonschema") / "builtin_schemas" / "vendor"
    schema = json.loads((schemas / "compose-spec.json").read_text())
    errors = sorted(Draft7Validator(schema).iter_errors(compose), key=str)
    assert not errors, errors[0].message


@pytest.mark.parametrize("name", ["gateway", "prefill", "decode"])
def test_commands_and_settings_exist(compose: dict[str, Any], name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    service = compose["services"][name]
    variables = {key: value for key, value in service["environment"].items() if key.startswith("TWOSTROKE_")}
    assert variables.keys() <= setting_variables()
    for key, value in variables.items():
        monkeypatch.setenv(key, str(value))
    context = parse(service["command"])
    assert context.command.name == name
    flags = given_flags({key: value for key, value in context.params.items() if key not in ("config", "parent")})
    if name == "gateway":
        gateway = load(GatewaySettings, flags)
        assert gateway.workers == ["prefill:50051", "decode:50051"]
    else:
        worker = load(WorkerSettings, {**flags, "role": name})
        assert worker.advertise == f"{name}:50051"
        assert str(worker.shm_dir) == "/pool"
    assert int(service["stop_grace_period"].removesuffix("s")) > GatewaySettings().drain_s


def test_the_model_is_fetched_first(compose: dict[str, Any]) -> None:
    services = compose["services"]
    assert parse(services["model"]["command"]).command.name == "pull"
    for name in ("gateway", "prefill", "decode"):
        assert services[name]["depends_on"]["model"]["condition"] == "service_completed_successfully"
        assert "models:/models" in services[name]["volumes"]


def test_workers_share_what_the_hand_over_needs(compose: dict[str, Any]) -> None:
    services = compose["services"]
    for name in ("prefill", "decode"):
        assert services[name]["pid"] == services[name]["ipc"] == "service:namespaces"
        assert "pool:/pool" in services[name]["volumes"]
    # the namespaces must not die with a worker
    assert services["namespaces"]["ipc"] == "shareable"
    assert services["namespaces"]["entrypoint"] == ["sleep", "infinity"]
    assert compose["volumes"]["pool"]["driver_opts"]["type"] == "tmpfs"


def test_only_the_gateway_is_reachable_and_only_from_here(compose: dict[str, Any]) -> None:
    published = {name: service["ports"] for name, service in compose["services"].items() if "ports" in service}
    assert published == {"gateway": ["127.0.0.1:50051:50051", "127.0.0.1:8000:8000"]}
    for service in compose["services"].values():
        assert service["cap_drop"] == ["ALL"]
        assert service["read_only"] is True
        assert not service.get("privileged")


def test_every_volume_is_declared(compose: dict[str, Any]) -> None:
    used = {volume.split(":")[0] for service in compose["services"].values() for volume in service.get("volumes", ())}
    assert used == set(compose["volumes"])


def test_the_image_runs_as_nobody_and_probes_itself() -> None:
    stages = [line.split() for line in INSTRUCTIONS if line.startswith("FROM ")]
    assert [stage[-1] for stage in stages] == ["builder", "runtime"]
    runtime = INSTRUCTIONS[INSTRUCTIONS.index(" ".join(stages[-1])) :]
    user = next(line.split()[1] for line in runtime if line.startswith("USER "))
    assert int(user) > 0
    assert 'ENTRYPOINT ["twostroke"]' in runtime
    command = json.loads(next(line for line in runtime if line.startswith("CMD ")).removeprefix("CMD "))
    listen = parse(command).params["listen"]
    probe = next(line for line in runtime if line.startswith("HEALTHCHECK ")).partition(" CMD ")[2]
    program, *arguments = json.loads(probe)
    assert program == "twostroke"
    probed = parse(arguments)
    assert probed.command.name == "health"
    assert split_address(probed.params["address"])[1] == split_address(listen)[1]


def test_the_image_is_made_of_files_that_exist() -> None:
    copied = [shlex.split(line)[1:-1] for line in INSTRUCTIONS if line.startswith("COPY ") and "--from" not in line]
    root = FOLDER.parent
    names = {name for group in copied for name in group}
    assert all((root / name).exists() for name in names), names
    allowed = set(re.findall(r"(?m)^!(.+)$", (FOLDER / "Dockerfile.dockerignore").read_text()))
    assert names == allowed
    assert {"services", "engine", "kernels", "kvtransfer", "src", "pyproject.toml", "constraints.txt"} <= names


def test_settings_in_the_image_exist() -> None:
    names = set(re.findall(r"TWOSTROKE_[A-Z_]+", DOCKERFILE))
    known = {variable(name) for schema in SECTIONS.values() for name in schema.model_fields}
    assert names
    assert names <= known
