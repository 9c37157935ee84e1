"""Ways to move pages into another worker's pool."""

import time
from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from ..errors import Mismatch
from .shm import SharedPool

_PROBE_BYTES = 64 << 20
_PROBE_S = 0.02
_Pages = npt.NDArray[np.uint8]


class Transport(Protocol):
    """Writes pages of one's own pool into a peer's. One thread uses it."""

    def copy(self, layer: int, src_pages: Sequence[int], dst_pages: Sequence[int]) -> None:
        """Copies src_pages[i] of one's own pool onto dst_pages[i] of the peer's, in one layer.

        Returns once the host has seen it completed. Raises ValueError, having written nothing, for a page or layer
        out of range, the peer's page 0 included, or unequal counts.
        """

    def probe(self) -> float:
        """Measured GB/s into the peer's pool. Touches only the peer's page 0, which holds nothing."""

    def close(self) -> None:
        """Lets go of the peer's pool. May be called again."""


class ShmTransport:
    """Into a mapped file of the same host, by the CPU."""

    def __init__(
        self,
        source: Tensor,  # [layers, pages, page_bytes] uint8, in CPU memory, pages contiguous
        pool: SharedPool,
        pages: int,
    ) -> None:
        """`pages`: those of the peer's pool, page 0 included. Raises Mismatch when the pool has another size."""
        layers, _, page_bytes = source.shape
        if pool.nbytes != layers * pages * page_bytes:
            raise Mismatch(
                f"the peer's pool has {pool.nbytes} bytes, not {layers} layers x {pages} pages x {page_bytes} bytes"
            )
        self._pool = pool
        self._source: _Pages | None = source.numpy()
        self._target: _Pages | None = pool.tensor.view(layers, pages, page_bytes).numpy()

    def copy(self, layer: int, src_pages: Sequence[int], dst_pages: Sequence[int]) -> None:
        """See `Transport.copy`."""
        source, target = self._mapped()
        if not 0 <= layer < len(source):
            raise ValueError(f"no layer {layer}")
        _check_pages(src_pages, source.shape[1], 0)
        _check_pages(dst_pages, target.shape[1], 1)
        from_layer, to_layer = source[layer], target[layer]
        for src, dst, count in _runs(src_pages, dst_pages):
            to_layer[dst : dst + count] = from_layer[src : src + count]

    def probe(self) -> float:
        """See `Transport.probe`."""
        source, target = self._mapped()
        source[:, 0].max(initial=0)  # maps the memory, so that the copies alone are measured
        target[:, 0] = source[:, 0]
        copied, start = 0, time.perf_counter()
        while copied < _PROBE_BYTES:
            for layer in range(len(source)):
                target[layer, 0] = source[layer, 0]
            copied += len(source) * source.shape[2]
            if time.perf_counter() - start > _PROBE_S:
                break
        return copied / max(time.perf_counter() - start, 1e-9) / 1e9

    def close(self) -> None:
        """See `Transport.close`; unmaps the peer's pool."""
        self._source = self._target = None
        self._pool.close()

    def _mapped(self) -> tuple[_Pages, _Pages]:
        if self._source is None or self._target is None:
            raise ValueError("the transport is closed")
        return self._source, self._target


def _check_pages(ids: Sequence[int], pages: int, first: int) -> None:
    if ids and not first <= min(ids) <= max(ids) < pages:
        raise ValueError(f"pages {min(ids)} to {max(ids)} are not all within {first} to {pages - 1}")


def _runs(src: Sequence[int], dst: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(src, dst, count) of stretches that are contiguous on both sides: fresh pools give long ones."""
    if len(src) != len(dst):
        raise ValueError(f"{len(src)} pages onto {len(dst)}")
    start = 0
    for i in range(1, len(src) + 1):
        if i == len(src) or src[i] != src[i - 1] + 1 or dst[i] != dst[i - 1] + 1:
            yield src[start], dst[start], i - start
            start = i
