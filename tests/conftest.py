"""Shared by all tests: one torch thread, as two cores serve many processes; without a GPU, Triton's interpreter.

With pytest-xdist (`make test`) a file's tests run in one process, and those of whole stacks one after another in one:
two stacks at once would have half a core for each of their processes.
"""

import os
from typing import Any

import pytest
import torch

torch.set_num_threads(1)
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined, so before any is imported


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Who runs what; None: as --dist says."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        """What has one scope runs in one process."""

        def _split_scope(self, nodeid: str) -> str:
            scope: str = super()._split_scope(nodeid)
            return "tests/e2e" if scope.startswith("tests/e2e/") else scope

    return Scheduling(config, log)
