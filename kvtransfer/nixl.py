"""Into a pool of another host, over NIXL."""

import logging
import threading
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np

from ..errors import Unavailable
from .digest_slots import no_digests
from .messages import Copy
from .nixl_agent import Places
from .nixl_export import NixlPool
from .nixl_source import NixlSource, Write
from .transport import Done, check_copy, runs

log = logging.getLogger(__name__)

_PROBE_BYTES = 16 << 20
_PROBE_S = 10.0
_CLOSE_S = 10.0

Run: TypeAlias = tuple[int, int, int]  # layer, page, pages


class NixlTransport:
    """Copies are begun and seen completed on the source's thread; neighbouring pages go as one.

    When a connection breaks while both processes live, what was sent may still arrive for a while. So copies that
    failed are done only once the peer is dead or has closed this export (`peer_gone`).
    """

    kind = "nixl"

    def __init__(
        self, source: NixlSource, descriptor: bytes, *, incarnation: int, pages: int, broken: Callable[[], None]
    ) -> None:
        """Meets the peer. `descriptor`: of a `NixlExport` of that incarnation, whose pool has so many `pages`, page 0
        included. `broken`: called once, on the source's thread, if a copy fails: a new export is needed.

        Raises Mismatch where the descriptor does not fit.
        """
        nbytes = source.layers * pages * source.page_bytes
        self._pool = pool = NixlPool.unpack(descriptor, incarnation=incarnation, nbytes=nbytes)
        source.agent.add(pool.metadata, pool.agent)
        self._source = source
        self._pages = pages
        self._broken = broken
        self._state = threading.Condition()
        self._told: dict[Write, Callable[[bytes], None]] = {}  # of writes whose end was not told
        self._telling = 0
        self._failed = self._gone = self._closed = False

    def start(self, copy: Copy, done: Done) -> None:
        """See `Transport.start`."""
        source = self._source
        check_copy(copy, layers=source.layers, src_pages=source.pages, dst_pages=self._pages)
        if not copy.src:
            done(copy.copy, b"")
            return
        stretches = list(runs(copy.src, copy.dst))
        local = [(copy.layer, src, count) for src, _, count in stretches]
        remote = [(copy.layer, dst, count) for _, dst, count in stretches]
        self._post(local, remote, copy, lambda digests: done(copy.copy, digests))

    def probe(self) -> float:
        """See `Transport.probe`. Unavailable where the peer does not answer. Of the second time, connections stand."""
        source, rate = self._source, 0.0
        again = max(1, min(_PROBE_BYTES // (source.layers * source.page_bytes), 1024))
        sink = [(layer, 0, 1) for layer in range(source.layers)] * again
        for _ in range(2):
            write = self._post(sink, sink, None, lambda digests: None)
            with self._state:
                self._state.wait_for(lambda write=write: self._failed or write not in self._told, _PROBE_S)  # type: ignore[misc]
                if self._failed or self._gone or write in self._told:
                    raise Unavailable("the peer's pool cannot be written over nixl")
            rate = write.nbytes / max(write.took, 1e-9) / 1e9
        return rate

    def peer_gone(self) -> None:
        """See `Transport.peer_gone`."""
        with self._state:
            self._gone = True
        self._source.call(self._give_up)

    def close(self) -> None:
        """See `Transport.close`."""
        with self._state:
            if self._closed:
                return
            self._closed = True
            self._state.wait_for(lambda: self._idle() or self._failed, _CLOSE_S)
            self._gone = self._gone or not self._idle()
        self._source.call(self._give_up)
        with self._state:
            if not self._state.wait_for(self._idle, _CLOSE_S):
                self._told.clear()

    def _idle(self) -> bool:
        return not self._told and not self._telling

    def _post(
        self, local: Sequence[Run], remote: Sequence[Run], copy: Copy | None, told: Callable[[bytes], None]
    ) -> Write:
        source, pool = self._source, self._pool
        write = Write(
            peer=pool.agent,
            local=self._places(local, source.address, source.pages, source.device),
            remote=self._places(remote, pool.address, self._pages, pool.device),
            remote_cuda=pool.cuda,
            ended=self._ended,
            copy=copy,
            ready=source.mark(copy.layer) if copy is not None else None,
        )
        with self._state:
            if self._closed:
                raise ValueError("the transport is closed")
            self._told[write] = told
        source.post(write)
        return write

    def _places(self, stretches: Sequence[Run], address: int, pages: int, device: int) -> Places:
        """Where they lie in a pool of so many pages a layer."""
        rows = np.array(stretches, np.uint64)
        page_bytes = np.uint64(self._source.page_bytes)
        out = np.empty((len(rows), 3), np.uint64)
        out[:, 0] = np.uint64(address) + (rows[:, 0] * np.uint64(pages) + rows[:, 1]) * page_bytes
        out[:, 1] = rows[:, 2] * page_bytes
        out[:, 2] = device
        return out

    def _ended(self, write: Write, landed: bool) -> None:
        """On the source's thread."""
        with self._state:
            breaks = not landed and not self._gone and not self._failed
            self._failed |= breaks
            told = self._told.pop(write, None) if landed or self._gone else None
            self._telling += told is not None
            self._state.notify_all()
        if breaks:
            log.warning("the connection with %s broke", write.peer)
            self._broken()
        if told is not None:
            self._tell(write, told, landed)

    def _give_up(self) -> None:
        """On the source's thread, behind all that was started: where the peer is gone, nothing of it matters."""
        with self._state:
            left = self._told if self._gone else {}
            self._telling += len(left)
            self._told = {} if self._gone else self._told
        for write, told in left.items():
            self._tell(write, told, False)
        self._source.leave(self._pool.agent)

    def _tell(self, write: Write, told: Callable[[bytes], None], landed: bool) -> None:
        pages = len(write.copy.src) if write.copy is not None else 0
        try:
            told(write.digests if landed else no_digests(pages))
        except Exception:
            log.exception("what followed a copy failed")
        finally:
            with self._state:
                self._telling -= 1
                self._state.notify_all()
