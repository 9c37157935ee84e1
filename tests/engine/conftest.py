"""Models for the engine's tests: the embedded one (converted once, in the user's cache) and a tiny random one."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from twostroke.engine.models import EMBEDDED, resolve


def _load_tiny() -> ModuleType:
    spec = importlib.util.spec_from_file_location("tiny", Path(__file__).parent.parent / "tiny.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def tiny() -> ModuleType:
    """The module `tests/tiny.py`: `make_tiny_llama(directory, **sizes)`, `make_tokenizer()`."""
    return _load_tiny()


@pytest.fixture(scope="session")
def tiny_llama_dir(tiny: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of 2 layers, width 64, 4 query and 2 KV heads, about 300 tokens, context 2048, in fp32."""
    directory: Path = tiny.make_tiny_llama(tmp_path_factory.mktemp("tiny") / "llama")
    return directory


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    """The embedded model's directory; the first run downloads and converts it into the user's cache."""
    return resolve(EMBEDDED)
