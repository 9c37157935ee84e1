"""Steps as CUDA graphs: one for each batch size, replayed instead of launching a few hundred kernels.

Drawing the tokens is captured apart: what a constraint allows is made up while the forward pass runs.
"""

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

    def logits(self, size: int) -> Tensor:
        """Where a captured step of that size leaves its logits, [size, vocab]."""
        return self._graphs[size][1]


class DrawGraphs:
    """How the tokens of captured steps are drawn, captured too: by batch size, and whether any is drawn at random."""

    def __init__(self) -> None:
        """None is captured."""
        self._graphs: dict[tuple[int, bool], torch.cuda.CUDAGraph] = {}

    def capture(self, size: int, random: bool, launch: Callable[[], None]) -> None:
        """`launch`: launches it, on memory that stays, and allocates none."""
        launch()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            launch()
        self._graphs[size, random] = graph

    def replay(self, size: int, random: bool) -> None:
        """Launches it."""
        self._graphs[size, random].replay()
