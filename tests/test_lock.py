"""constraints.txt pins all that pyproject.toml asks for, fits it, and names no place to fetch it from."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

packaging = pytest.importorskip("packaging")
from packaging.requirements import Requirement  # noqa: E402
from packaging.utils import canonicalize_name  # noqa: E402

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LINES = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
PINS = {canonicalize_name(name): version for name, _, version in (line.partition("==") for line in LINES)}
WANTED = [Requirement(text) for text in PROJECT["dependencies"] + PROJECT["optional-dependencies"]["dev"]]


@pytest.mark.parametrize("wanted", WANTED, ids=str)
def test_every_dependency_is_pinned(wanted: Requirement) -> None:
    assert wanted.specifier.contains(PINS[canonicalize_name(wanted.name)], prereleases=True)


def test_pins_are_exact_and_name_no_place() -> None:
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.]+", line) for line in LINES)
    assert sorted(LINES, key=str.lower) == sorted(set(LINES), key=str.lower)


def test_the_generator_is_the_oldest_runtime_supported() -> None:
    """Generated stubs refuse a runtime older than their generator."""
    runtime = next(str(r.specifier) for r in WANTED if r.name == "grpcio")
    generator = next(str(r.specifier) for r in WANTED if r.name == "grpcio-tools")
    assert runtime.removeprefix(">=") == generator.removeprefix("==")


def test_scripts_of_the_shell() -> None:
    script = ROOT / ".ci" / "run"
    assert script.stat().st_mode & 0o111
    subprocess.run(["bash", "-n", str(script)], check=True)


def test_make_knows_its_targets() -> None:
    for target in (
        "demo",
        "test",
        "test-all",
        "soak",
        "clients",
        "gateways",
        "bench-cpu",
        "lint",
        "protos",
        "docs",
        "clean",
        "help",
    ):
        dry = ["make", "-n", "-C", str(ROOT), "VENV=/tmp/no-such-venv", target]
        done = subprocess.run(dry, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
