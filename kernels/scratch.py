"""Memory for intermediate results that is kept from call to call: fresh large blocks cost a page fault every 4 KiB."""

import math

import torch
from torch import Tensor


class Scratch:
    """Named buffers that grow to the largest size asked for. One thread at a time; contents do not last."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._device = device
        self._buffers: dict[tuple[str, torch.dtype], Tensor] = {}

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """An uninitialised contiguous tensor; it shares memory with what the same name and dtype gave before."""
        numel = math.prod(shape)
        buffer = self._buffers.get((name, dtype))
        if buffer is None or buffer.numel() < numel:
            buffer = self._buffers[name, dtype] = torch.empty(numel, dtype=dtype, device=self._device)
        return buffer[:numel].view(shape)
