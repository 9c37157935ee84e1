"""Fixtures of the services' tests."""

from pathlib import Path

import pytest

from ..tiny import make_tiny_llama


@pytest.fixture(scope="session")
def tiny_llama_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of 2 layers with a small tokenizer and a context of 2048; its directory is named `llama`."""
    return make_tiny_llama(tmp_path_factory.mktemp("tiny") / "llama")
