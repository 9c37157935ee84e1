"""Ways to move pages into another worker's pool."""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TypeAlias, runtime_checkable

import numpy as np
import numpy.typing as npt
from torch import Tensor

from ..errors import Mismatch
from ..kernels.digest import page_digests
from .messages import Copy
from .shm import SharedPool

Done: TypeAlias = Callable[[int, bytes], None]
"""A copy's number and the digests of its source pages, 8 bytes each: the host has seen it completed. Any thread."""

_PROBE_BYTES = 64 << 20
_PROBE_S = 0.02
_Pages = npt.NDArray[np.uint8]


class Transport(Protocol):
    """Writes pages of one's own pool into a peer's. One thread uses it."""

    kind: str  # `shm`, `nixl`, `cuda_ipc`

    def start(self, copy: Copy, done: Done) -> None:
        """Begins to copy copy.src[i] of one's own pool onto copy.dst[i] of the peer's, in one layer.

        `done` comes once: within this call on this thread, or later on a thread of the transport's. A copy that failed
        later is done with digests of zeros, once it writes no more. Raises ValueError, having written nothing and
        without `done`, for a page or layer out of range, the peer's page 0 included, or unequal counts.
        """

    def probe(self) -> float:
        """Measured GB/s into the peer's pool. Touches only the peer's page 0, which holds nothing."""

    def peer_gone(self) -> None:
        """The peer is dead, or has taken this access to its pool back: what was started and cannot end is done soon,
        with digests of zeros. Never blocks; `close` follows.
        """

    def close(self) -> None:
        """Waits for started copies, which end by success, error or the peer's death, and lets go of the peer's pool.

        No `done` comes once it returned. May be called again.
        """


@runtime_checkable
class LayersTransport(Transport, Protocol):
    """A transport to which copies of several layers at once come cheaper than one by one."""

    def start_layers(self, copies: Sequence[Copy], done: Callable[[bytes], None]) -> None:
        """As `start`, of copies of the same pages in layers that follow each other; `done` gets the digests of all,
        layer by layer. All are started, or none is.
        """


class ShmTransport:
    """Into a mapped file of the same host, by the CPU. Copies are done at once."""

    kind = "shm"

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
        self._pages = source
        self._source: _Pages | None = source.numpy()
        self._target: _Pages | None = pool.tensor.view(layers, pages, page_bytes).numpy()

    def start(self, copy: Copy, done: Done) -> None:
        """See `Transport.start`."""
        source, target = self._mapped()
        check_copy(copy, layers=len(source), src_pages=source.shape[1], dst_pages=target.shape[1])
        from_layer, to_layer = source[copy.layer], target[copy.layer]
        for src, dst, count in runs(copy.src, copy.dst):
            to_layer[dst : dst + count] = from_layer[src : src + count]
        done(copy.copy, source_digests(self._pages, copy))

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

    def peer_gone(self) -> None:
        """See `Transport.peer_gone`: nothing is under way."""

    def close(self) -> None:
        """See `Transport.close`; unmaps the peer's pool."""
        self._source = self._target = None
        self._pool.close()

    def _mapped(self) -> tuple[_Pages, _Pages]:
        if self._source is None or self._target is None:
            raise ValueError("the transport is closed")
        return self._source, self._target


def source_digests(
    pages: Tensor,  # [layers, pages, page_bytes] uint8, one's own pool
    copy: Copy,
) -> bytes:
    """Of the pages that `copy` reads, in its order."""
    return page_digests(pages[copy.layer], copy.src, ticket=copy.ticket, layer=copy.layer, ordinal=copy.ordinal)


def check_copy(copy: Copy, *, layers: int, src_pages: int, dst_pages: int) -> None:
    """ValueError unless all of it lies within pools of so many pages, page 0 of the target apart."""
    if not 0 <= copy.layer < layers:
        raise ValueError(f"no layer {copy.layer}")
    if len(copy.src) != len(copy.dst):
        raise ValueError(f"{len(copy.src)} pages onto {len(copy.dst)}")
    _check_pages(copy.src, src_pages, 0)
    _check_pages(copy.dst, dst_pages, 1)


def _check_pages(ids: Sequence[int], pages: int, first: int) -> None:
    if ids and not first <= min(ids) <= max(ids) < pages:
        raise ValueError(f"pages {min(ids)} to {max(ids)} are not all within {first} to {pages - 1}")


def runs(src: Sequence[int], dst: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(src, dst, count) of stretches that are contiguous on both sides: fresh pools give long ones."""
    start = 0
    for i in range(1, len(src) + 1):
        if i == len(src) or src[i] != src[i - 1] + 1 or dst[i] != dst[i - 1] + 1:
            yield src[start], dst[start], i - start
            start = i
