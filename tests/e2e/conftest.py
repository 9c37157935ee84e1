"""Fixtures of the end-to-end tests: real processes, on a tiny random model or on the embedded one."""

import itertools
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest

from twostroke.engine.models import resolve

from ..tiny import make_tiny_llama
from .harness import Launch, Stack, launched


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    """The embedded model, converted once into the user's cache."""
    return resolve("smollm2-135m")


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama."""
    return make_tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def launch(tmp_path: Path) -> Launch:
    """Starts a stack: `async with launch("--model", ...) as stack`."""
    numbers = itertools.count()

    def start(*flags: str) -> AbstractAsyncContextManager[Stack]:
        return launched(tmp_path / f"stack-{next(numbers)}.log", *flags)

    return start
