"""Numbers on their way to the device: one copy a step, out of pinned memory."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

DEPTH = 4  # host buffers: more than steps on their way
MOST_KEPT = 256  # layouts whose tensors are kept
ALIGNMENT = 16  # numbers: kernels are compiled for addresses that are multiples of 16 bytes


def new_event() -> torch.cuda.Event:
    """A marker on a stream."""
    return torch.cuda.Event()  # type: ignore[no-untyped-call]


class Staging:
    """A buffer of 32-bit integers on the device, written from the host without waiting."""

    def __init__(self, count: int, device: torch.device) -> None:
        """`count`: most numbers of a step."""
        pinned = device.type == "cuda"
        self._host = [torch.zeros(count, dtype=torch.int32, pin_memory=pinned) for _ in range(DEPTH)]
        self._views: list[npt.NDArray[np.int32]] = [buffer.numpy() for buffer in self._host]
        self._copied: list[torch.cuda.Event | None] = [new_event() if pinned else None for _ in range(DEPTH)]
        self._device = torch.zeros(count, dtype=torch.int32, device=device)
        self._views_of: dict[tuple[int, ...], list[Tensor]] = {}  # by sizes
        self._turn = 0

    def send(self, parts: Sequence[Sequence[int] | npt.NDArray[np.int32]], sizes: Sequence[int]) -> list[Tensor]:
        """Copies each part to the device, on the current stream; the rest of its size is filled with zeros.

        Returns int32 tensors of these sizes, valid until the next call. Where a part lies depends on the sizes only.
        """
        self._turn = (self._turn + 1) % DEPTH
        event, view = self._copied[self._turn], self._views[self._turn]
        if event is not None:
            event.synchronize()  # the copy out of this buffer, some steps ago, is long done
        places, end = [], 0
        for part, size in zip(parts, sizes, strict=True):
            count = len(part)
            if count:
                view[end : end + count] = part
            view[end + count : end + size] = 0
            places.append(end)
            end += -(-size // ALIGNMENT) * ALIGNMENT
        if end > len(view):
            raise ValueError(f"{end} numbers in a buffer of {len(view)}")
        self._device[:end].copy_(self._host[self._turn][:end], non_blocking=True)
        if event is not None:
            event.record()
        key = tuple(sizes)
        views = self._views_of.get(key)
        if views is None:  # decode steps have a few sizes again and again
            if len(self._views_of) >= MOST_KEPT:
                self._views_of.clear()
            views = [self._device[place : place + size] for place, size in zip(places, sizes, strict=True)]
            self._views_of[key] = views
        return views

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return self._device.nbytes
