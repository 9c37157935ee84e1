"""Hub models, against a local server that speaks the hub's few endpoints."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from twostroke.engine import hub
from twostroke.engine.model_files import PARTS, Part
from twostroke.engine.models import cached, fingerprint
from twostroke.errors import ConfigError

from .hub_server import COMMIT, Hub, serve

_CHILD = """
import json, sys
from pathlib import Path
from twostroke.engine.models import resolve
from twostroke.errors import ConfigError
try:
    print(json.dumps([str(resolve(sys.argv[1], cache_dir=Path(sys.argv[2]))), ""]))
except ConfigError as error:
    print(json.dumps(["", error.message]))
"""


@pytest.fixture
def server(tiny_llama_dir: Path, tmp_path: Path) -> Iterator[Hub]:
    """A repository as they are: with pickles, other formats and a readme beside the model."""
    folder = Path(shutil.copytree(tiny_llama_dir, tmp_path / "repository"))
    for name in (
        "pytorch_model.bin",
        "training_args.bin",
        "README.md",
        "model.gguf",
        "consolidated.safetensors",
        "x.py",
    ):
        (folder / name).write_bytes(b"not wanted")
    (folder / "onnx").mkdir()
    (folder / "onnx" / "config.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("x")
    with serve(folder) as running:
        yield running


def resolve_in_child(server: Hub, name: str, cache: Path, **variables: str) -> tuple[str, str]:
    """`resolve` as a user calls it: the hub library reads its variables at import."""
    environment = {**os.environ, "HF_ENDPOINT": server.endpoint, "NO_PROXY": "127.0.0.1", **variables}
    command = [sys.executable, "-c", _CHILD, name, str(cache)]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert ran.returncode == 0, ran.stderr
    path, message = json.loads(ran.stdout)
    return path, message


def test_fetches_what_serving_needs_and_no_more(server: Hub, tiny_llama_dir: Path, tmp_path: Path) -> None:
    events: list[tuple[str, int, int]] = []
    path = hub.fetch(
        "org/tiny", cache_dir=tmp_path / "hub", endpoint=server.endpoint, progress=lambda *event: events.append(event)
    )
    names = {path.name for path in tiny_llama_dir.iterdir()} | {"chat_template.jinja"}
    assert {file.name for file in path.iterdir()} == server.fetched() == names
    assert fingerprint(path) == fingerprint(tiny_llama_dir)
    size = sum(file.stat().st_size for file in path.iterdir())
    assert events[-1] == ("download", size, size)
    assert all(0 <= done <= total for _, done, total in events)
    server.requests.clear()
    assert hub.fetch("org/tiny", "v1", cache_dir=tmp_path / "hub", endpoint=server.endpoint) == path
    assert server.fetched() == set()  # the same commit


def test_fetches_a_part_and_later_the_rest(server: Hub, tmp_path: Path) -> None:
    def fetch(*parts: Part) -> set[str]:
        server.requests.clear()
        hub.fetch("org/tiny", cache_dir=tmp_path / "hub", endpoint=server.endpoint, parts=parts)
        return server.fetched()

    assert fetch("config") == {"config.json", "generation_config.json"}
    assert fetch("config", "tokenizer") == {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
    assert hub.snapshots(tmp_path / "hub") == []  # it cannot be served
    assert fetch(*PARTS) == {"model.safetensors"}
    assert len(hub.snapshots(tmp_path / "hub")) == 1


def test_refusals(server: Hub, tmp_path: Path) -> None:
    def message(repository: str, revision: str | None = None) -> str:
        with pytest.raises(ConfigError) as caught:
            hub.fetch(repository, revision, cache_dir=tmp_path / "hub", endpoint=server.endpoint)
        assert caught.value.field == "model"
        return caught.value.message

    assert "'org/absent' was not found on the hub" in message("org/absent")
    assert "'org/gated' is gated" in message("org/gated")
    assert "HF_TOKEN" in message("org/gated")
    assert "'org/tiny@v9' is a model without this revision" in message("org/tiny", "v9")
    assert "is not a hub id" in message("org/na--me")
    (server.folder / "model.safetensors").unlink()
    assert "lacks *.safetensors" in message("org/tiny")
    server.broken = True
    assert "'org/tiny@v1' is not in the cache and the hub cannot be reached" in message("org/tiny", "v1")


def test_without_network_the_cache_serves(server: Hub, tmp_path: Path) -> None:
    cache = tmp_path / "models"
    path, _ = resolve_in_child(server, "org/tiny", cache)
    assert Path(path) == cache / "hub" / "models--org--tiny" / "snapshots" / COMMIT
    assert [(model.name, model.path) for model in cached(cache)] == [("org/tiny", Path(path))]
    server.requests.clear()
    assert resolve_in_child(server, "org/tiny", cache, HF_HUB_OFFLINE="1") == (path, "")
    assert server.requests == []
    assert "unset HF_HUB_OFFLINE" in resolve_in_child(server, "org/other", cache, HF_HUB_OFFLINE="1")[1]
    nowhere = {"HF_ENDPOINT": "http://127.0.0.1:9"}
    assert resolve_in_child(server, "org/tiny", cache, **nowhere) == (path, "")
    assert "check the network" in resolve_in_child(server, "org/other@v1", cache, **nowhere)[1]
