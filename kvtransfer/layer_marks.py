"""How far the engine's launched steps have come, layer by layer, as whatever reads a pool on a GPU waits for it."""

import torch


class LayerMarks:
    """An event for each layer: the last write that was launched. Copies may be launched long after it, in the middle of
    another step or between two: what then is the current stream's end tells nothing of the write.
    """

    def __init__(self, layers: int, device: torch.device) -> None:
        """`device`: the pool's."""
        with torch.cuda.device(device):
            self._events = [torch.cuda.Event(blocking=True) for _ in range(layers)]  # type: ignore[no-untyped-call]

    def written(self, layer: int) -> None:
        """All that the engine's step writes into that layer is launched on the current stream. The engine's thread."""
        self._events[layer].record()

    def of(self, layer: int) -> torch.cuda.Event:
        """Happens once the last write is computed; at once where there was none. Whoever asks before the next write may
        wait after it, and then waits for that one too.
        """
        return self._events[layer]
