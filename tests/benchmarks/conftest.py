"""Benchmarks are scripts that import each other by bare names."""

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """A script of that name as a module; it, and what it imports of its neighbours, is forgotten afterwards."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    for path in BENCHMARKS.glob("*.py"):
        monkeypatch.delitem(sys.modules, path.stem, raising=False)
    return importlib.import_module
