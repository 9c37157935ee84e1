"""Decode steps as CUDA graphs: one for each batch size, replayed instead of launching a few hundred kernels."""

from bisect import bisect_left
from collections.abc import Callable, Sequence

import torch
from torch import Tensor


class DecodeGraphs:
    """Captured steps by batch size. They share one memory pool: only one runs at a time."""

    def __init__(self, sizes: Sequence[int]) -> None:
        """`sizes`: rising; none: nothing is captured."""
        self.sizes = tuple(sizes)
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}

    def capture(
        self, prepare: Callable[[int], Callable[[], Tensor]], told: Callable[[int, int], None] | None = None
    ) -> None:
        """`prepare(size)` gives what launches a step of `size` rows on memory that stays, and returns its logits.

        `told`: shown how many are captured, of how many. The largest comes first: the others fit into its memory.
        """
        pool = None
        for done, size in enumerate(reversed(self.sizes)):
            launch = prepare(size)
            launch()  # outside first: what this size needs is compiled and loaded
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                logits = launch()
            pool = pool or graph.pool()
            self._graphs[size] = graph, logits
            if told is not None:
                told(done + 1, len(self.sizes))

    def size_for(self, rows: int) -> int:
        """The smallest captured batch size that holds `rows`; 0: none does."""
        at = bisect_left(self.sizes, rows)
        return self.sizes[at] if at < len(self.sizes) and self._graphs else 0

    def replay(self, size: int) -> Tensor:
        """Launches that step; its logits, [size, vocab], valid until the next replay."""
        graph, logits = self._graphs[size]
        graph.replay()
        return logits
