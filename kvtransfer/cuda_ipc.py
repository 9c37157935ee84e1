"""Into the pool of a decode worker on a GPU of the same host: the same one, or one that is linked with ours."""

import logging
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from ..errors import Mismatch, TwostrokeError
from .messages import Copy
from .page_batch import LayersAt, PageBatch, PageBatches
from .transport import Done

if TYPE_CHECKING:  # Triton is not installed where a CPU serves
    from .cuda_source import CudaSource, Landed

log = logging.getLogger(__name__)

_PROBE_COPIES = 256
_CLOSE_S = 10.0  # copies of a GPU that works are done within milliseconds


class Mapped(Protocol):
    """A peer's pool; see `PeerCudaPool`."""

    address: int
    nbytes: int

    def close(self) -> None:
        """Unmaps it."""
        ...


class CudaIpcTransport:
    """Layers' pages go in one batch by the copy engines, while the next ones compute. `done` comes later."""

    kind = "cuda_ipc"

    def __init__(self, source: "CudaSource", pool: Mapped, pages: int) -> None:
        """`pages`: those of the peer's pool, page 0 included. Raises Mismatch when the pool has another size."""
        if pool.nbytes != source.layers * pages * source.page_bytes:
            raise Mismatch(
                f"the peer's pool has {pool.nbytes} bytes, not {source.layers} layers x {pages} pages x "
                f"{source.page_bytes} bytes"
            )
        self._source = source
        self._pool = pool
        self._pages = pages
        self._batches = PageBatches(source.layers, source.pages, pages, source.page_bytes)
        self._state = threading.Condition()
        self._started = 0  # copies whose end was not told
        self._open = True

    def start(self, copy: Copy, done: Done) -> None:
        """See `Transport.start`. The layer of a page must have been told `CudaSource.written`, or be older."""
        self.start_layers((copy,), lambda digests: done(copy.copy, digests))

    def start_layers(self, copies: Sequence[Copy], done: Callable[[bytes], None]) -> None:
        """See `LayersTransport.start_layers`."""
        batch = self._batches.of(copies[-1])
        if copies[0].layer < 0:
            raise ValueError(f"no layer {copies[0].layer}")
        with self._state:
            if not self._open:
                raise ValueError("the transport is closed")
            self._started += 1

        def landed(digests: bytes) -> None:
            try:
                done(digests)
            finally:
                self._ended()

        try:
            self._push(copies, batch, landed)
        except BaseException:
            self._ended()
            raise

    def probe(self) -> float:
        """See `Transport.probe`. Page 0 of each layer, many times: a batch of few would measure the call."""
        layers = self._source.layers
        pages = (0,) * max(1, _PROBE_COPIES // layers)
        batch = PageBatch(pages, pages, self._source.page_bytes)
        return self._source.measure(batch, layers, LayersAt(self._pool.address, self._pages))

    def peer_gone(self) -> None:
        """See `Transport.peer_gone`: copies end whether or not the pool's owner lives."""

    def close(self) -> None:
        """See `Transport.close`; unmaps the peer's pool, so that a dead owner's memory is free."""
        with self._state:
            was_open, self._open = self._open, False
            if not self._state.wait_for(lambda: not self._started, _CLOSE_S):
                log.error("%d copies did not end within %g s; the pool stays mapped", self._started, _CLOSE_S)
                return
        if was_open:
            try:
                self._pool.close()
            except TwostrokeError as error:  # the device failed: all that it had mapped is gone with it
                log.error("the pool could not be unmapped: %s", error.message)

    def _push(self, copies: Sequence[Copy], batch: PageBatch, landed: "Landed") -> None:
        begin = self._pool.address + copies[0].layer * self._pages * self._source.page_bytes
        self._source.push(copies, batch, LayersAt(begin, self._pages), landed)

    def _ended(self) -> None:
        with self._state:
            self._started -= 1
            self._state.notify_all()
