"""How far the engine's launched steps have come, layer by layer, as whatever reads a pool on a GPU waits for it."""

from bisect import bisect_left

import torch

_STRETCHES = 5  # that a step's layers are told of in


def stretch_ends(layers: int, most: int = _STRETCHES) -> tuple[int, ...]:
    """The last layer of each stretch of layers whose pages leave together: `most` of them, each half as long as the one
    before, so that little is left to be sent after the last.

    A layer's pages are sent in a hundredth of the time that it is computed in, so what is held back costs nothing; what
    every launch costs the host does, because the host launches a short prompt's layers hardly faster than they run.
    """
    halves = {layers - (layers >> count) - 1 for count in range(1, most)}
    return tuple(sorted(end for end in {*halves, layers - 1} if end >= 0))


class LayerMarks:
    """An event for each stretch of layers: the last write that was launched. Copies may be launched long after it, in
    the middle of another step or between two: what then is the current stream's end tells nothing of the write.
    """

    def __init__(self, layers: int, device: torch.device) -> None:
        """`device`: the pool's."""
        self.ends = stretch_ends(layers)
        with torch.cuda.device(device):
            self._events = [torch.cuda.Event(blocking=True) for _ in self.ends]  # type: ignore[no-untyped-call]

    def written(self, layer: int) -> None:
        """All that the engine's step writes up to that layer is launched on the current stream; the engine's thread.
        Enough of the ends: the later one counts of two in a stretch.
        """
        self.of(layer).record()

    def of(self, layer: int) -> torch.cuda.Event:
        """Happens once the last write of that layer's stretch is computed; at once where there was none. Whoever asks
        before the next write may wait after it, and then waits for that one too.
        """
        return self._events[bisect_left(self.ends, layer)]
