"""What the parts of an engine really take of a GPU's memory, beside what was planned."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from .memory_plan import MemoryPlan, gib

log = logging.getLogger(__name__)

SLACK = 64 << 20  # bytes: allocators round up


class MemoryMeter:
    """Differences of the device's free memory: another process that starts or ends at the same time falsifies them."""

    def __init__(self, device: str) -> None:
        """On a CPU nothing is measured."""
        self._device = device if torch.device(device).type == "cuda" else None
        self.taken: dict[str, int] = {}  # bytes by part

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """What is allocated inside, and still is at its end, counts for `name`; a part may be entered again."""
        before = self._free()
        yield
        if self._device is not None:
            self.taken[name] = self.taken.get(name, 0) + max(0, before - self._free())

    def _free(self) -> int:
        if self._device is None:
            return 0
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()  # what torch keeps for later is not taken
        return torch.cuda.mem_get_info(self._device)[0]

    def beside(self, plan: MemoryPlan) -> MemoryPlan:
        """The plan with what was measured; warns of each part that took more."""
        taken = dict(self.taken)
        if "workspace" in taken:  # the tables are made together with the buffers
            taken["rotation"] = min(plan.rotation, taken["workspace"])
            taken["workspace"] -= taken["rotation"]
        measured = plan.with_measured(**taken)
        for name, excess in measured.exceeded().items():
            if excess > SLACK:
                log.warning("%s take %s GiB more than planned", name, gib(excess))
        return measured
