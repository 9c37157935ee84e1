"""The wheel holds every module, links followed, and its command runs away from the checkout."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from twostroke import __version__

ROOT = Path(__file__).parent.parent
FOLDERS = ("services", "engine", "kernels", "kvtransfer")
pytest.importorskip("setuptools")
pytest.importorskip("pip")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy of the tracked files' places: a build leaves nothing in the checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        (source / name).write_bytes((ROOT / name).read_bytes())
    subprocess.run(["cp", "-a", *(str(ROOT / name) for name in (*FOLDERS, "src")), str(source)], check=True)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-q"]
    done = subprocess.run([*command, "-w", str(folder), str(source)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return next(folder.glob("twostroke-*.whl"))


def test_every_module_is_inside(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        wanted = {
            f"twostroke/{path.relative_to(ROOT)}": path.read_bytes()
            for folder in FOLDERS
            for path in (ROOT / folder).rglob("*.py")
        }
        for path in (ROOT / "src" / "twostroke").glob("*.py"):
            wanted[f"twostroke/{path.name}"] = path.read_bytes()
        for package in ("v1", "oip", "smg"):
            for path in (ROOT / "src" / "twostroke" / package).glob("*.py*"):
                if path.suffix in (".py", ".pyi"):
                    wanted[f"twostroke/{package}/{path.name}"] = path.read_bytes()
        assert not wanted.keys() - names
        for name, content in wanted.items():
            assert archive.read(name) == content, name
    assert "twostroke/py.typed" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    strangers = {name for name in names if not name.startswith(("twostroke/", f"twostroke-{__version__}.dist-info/"))}
    assert not strangers
    assert not [name for name in names if "__init__" in name and "/kernels/" in name]


def test_the_command_runs_elsewhere(wheel: Path, tmp_path: Path) -> None:
    target = tmp_path / "site"
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", str(target)]
    subprocess.run([*command, str(wheel)], check=True, capture_output=True)
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(target), "HOME": str(tmp_path)}

    def run(*words: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [sys.executable, str(target / "bin" / "twostroke"), *words],
            env=environment,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )

    assert run("--version").stdout.strip() == f"twostroke, version {__version__}"
    where = "import twostroke.services.cli as c; print(c.__file__)"
    found = subprocess.run(
        [sys.executable, "-c", where], env=environment, cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert found.stdout.startswith(str(target))
    assert "Serve a language model" in run("--help").stdout
    listed = run("models", "list", "--json", "--models-dir", str(tmp_path / "none"))
    assert listed.stdout.strip() == "[]", listed.stderr
