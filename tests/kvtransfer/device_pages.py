"""Pages in a GPU's memory, a peer's too, read and written as an array is: where a transport does damage."""

import contextlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from twostroke.kvtransfer.cuda_ipc import CudaIpcTransport
from twostroke.kvtransfer.cuda_pool import tensor_at

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class DevicePages:
    """One layer's. Reads and writes are over when they return; any thread."""

    def __init__(
        self,
        pages: Tensor,  # [pages, page_bytes] uint8
        stream: Any = None,
    ) -> None:
        """`stream`: on which that is done, a GPU's; without it, memory is a CPU's."""
        self._pages = pages
        self._stream = stream

    def __getitem__(self, rows: Sequence[int]) -> Bytes:
        """[rows, page_bytes], a copy."""
        with self._done():
            return self._pages[torch.tensor(rows, device=self._pages.device)].cpu().numpy().copy()

    def __setitem__(self, rows: Sequence[int], values: Bytes) -> None:
        """`values`: [rows, page_bytes]."""
        with self._done():
            places = torch.tensor(rows, device=self._pages.device)
            self._pages[places] = torch.from_numpy(values).to(self._pages.device)

    @contextlib.contextmanager
    def _done(self) -> Any:
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            yield
            self._stream.synchronize()


def peer_pages(transport: CudaIpcTransport) -> list[DevicePages]:
    """Of the pool that it writes into, layer by layer."""
    source, pool = transport._source, transport._pool
    pages = tensor_at(pool.address, pool.nbytes, source.device).view(source.layers, -1, source.page_bytes)
    stream = torch.cuda.Stream(source.device)  # type: ignore[no-untyped-call]
    return [DevicePages(pages[layer], stream) for layer in range(source.layers)]
