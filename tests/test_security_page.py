"""docs/security.md: its example runs, and it names only what there is."""

import asyncio
import os
import re
import subprocess
import sys
from pathlib import Path

import click
import pytest

from twostroke.services.cli import main
from twostroke.services.configure import load_up
from twostroke.services.describe import SECTIONS
from twostroke.services.gateway.security import authenticator, door_credentials
from twostroke.services.security.cluster import cluster_dialer, worker_credentials
from twostroke.services.security.limits import RANGES
from twostroke.services.supervisor.up import plan

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```sh\n(.*?)```", TEXT, re.DOTALL)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With what the page's first two blocks make, up to the command that stays."""
    command = tmp_path / "bin" / "twostroke"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m twostroke.services.cli "$@"\n')
    command.chmod(0o755)
    steps = BLOCKS[0] + BLOCKS[1].partition("twostroke up")[0]
    environment = os.environ | {"PATH": f"{command.parent}:{os.environ['PATH']}"}
    subprocess.run(["bash", "-e", "-c", steps], cwd=tmp_path, check=True, env=environment, capture_output=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


async def test_the_example_makes_settings_that_hold(folder: Path) -> None:
    up, gateway, worker = load_up({}, folder / "twostroke.toml")
    assert door_credentials(gateway) is not None
    assert worker_credentials(worker) is not None
    assert cluster_dialer(gateway) is not cluster_dialer(gateway.model_copy(update={"cluster_ca": None}))
    auth = authenticator(gateway)
    acme, ops = (
        auth.authenticate([("authorization", f"Bearer {(folder / name).read_text().strip()}")])
        for name in ("acme.key", "ops.key")
    )
    assert (acme.name, acme.admin, acme.limits.max_requests) == ("acme", False, 32)
    assert (ops.name, ops.admin) == ("ops", True)
    stack = plan(up, gateway.model_copy(update={"listen": "127.0.0.1:0", "http_listen": ""}), worker)
    assert stack.gateway.health_address == "127.0.0.1:50052"


def parameters() -> list[click.Parameter]:
    groups = [command for command in main.commands.values() if isinstance(command, click.Group)]
    commands = [*main.commands.values(), *(command for group in groups for command in group.commands.values())]
    return [parameter for command in commands for parameter in command.params]


def test_names() -> None:
    flags = {word for parameter in parameters() for word in (*parameter.opts, *parameter.secondary_opts)}
    plain = re.sub(r"```.*?```", "", TEXT, flags=re.DOTALL)
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", plain)) <= flags
    fields = {name for schema in SECTIONS.values() for name in schema.model_fields}
    of_keys = {"cache_salt", "api_key", *RANGES}
    named = set(re.findall(r"`([a-z]+_[a-z_]+)(?: = [^`]*)?`", plain))
    assert len(named) > 15
    assert named <= fields | of_keys


def test_links() -> None:
    for target in re.findall(r"\]\(([\w./-]+)\)", TEXT):
        assert (ROOT / "docs" / target).is_file(), target


@pytest.mark.slow
async def test_the_example_runs(folder: Path) -> None:
    """All of it but its ports, with a small model."""
    from twostroke.services.supervisor.machine import free_ports

    from .tiny import make_tiny_llama

    door, http, orders = free_ports(3)
    text = (folder / "twostroke.toml").read_text().replace("127.0.0.1:50052", f"127.0.0.1:{orders}")
    (folder / "twostroke.toml").write_text(text)
    model = make_tiny_llama(folder / "model")
    command = [sys.executable, "-m", "twostroke.services.cli"]
    more = ["--model", str(model), "--kv-memory", "8MiB", "--threads", "1", "--json"]
    places = ["--listen", f"127.0.0.1:{door}", "--http-listen", f"127.0.0.1:{http}"]
    up = await asyncio.create_subprocess_exec(
        *command, "up", "--config", "twostroke.toml", *places, *more, stdout=asyncio.subprocess.PIPE
    )
    try:
        assert up.stdout is not None
        async with asyncio.timeout(90):
            while b'"serving"' not in await up.stdout.readline():
                pass
        generate, workers, curl = BLOCKS[2].strip().splitlines()
        generate = generate.replace("generate", f"generate --address localhost:{door} --max-tokens 3")
        for line in (generate, workers.replace("50052", str(orders)), curl.replace("8000", str(http)) + " --fail -sS"):
            shell = line.replace("twostroke", f"{sys.executable} -m twostroke.services.cli", 1)
            it = await asyncio.create_subprocess_exec("bash", "-c", shell)
            assert await asyncio.wait_for(it.wait(), 60) == 0, line
    finally:
        up.terminate()
        await asyncio.wait_for(up.wait(), 60)
