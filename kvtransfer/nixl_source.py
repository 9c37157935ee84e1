"""A prefill worker's pool as NIXL sends it, and the thread that does so."""

import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor

from ..errors import Unavailable
from .layer_marks import LayerMarks
from .messages import Copy
from .nixl_agent import Handle, NixlAgent, Places, device_of
from .nixl_export import agent_name
from .transport import source_digests

log = logging.getLogger(__name__)

_SHORTEST_S, _LONGEST_S = 0.0001, 0.02
_SHARE = 8  # a write is looked at again when it has become older by this part of its age

Ended: TypeAlias = Callable[["Write", bool], None]
"""On the source's thread: whether all of it is at its place."""


@dataclass(slots=True, eq=False)
class Write:
    """Stretches of the pool on their way to a peer."""

    peer: str
    local: Places
    remote: Places
    remote_cuda: bool
    ended: Ended
    copy: Copy | None = None  # to be digested
    ready: torch.cuda.Event | None = None  # what is to be sent is computed
    digests: bytes = b""
    begun: float = 0.0  # when it was handed to the network; `time.monotonic()`
    took: float = 0.0  # seconds, once it is there
    handle: Handle = field(default=0)

    @property
    def nbytes(self) -> int:
        """Of all stretches."""
        return int(self.local[:, 1].sum())


class NixlSource:
    """One's own pool, and one thread for all that leaves it. Any thread may call.

    The library has no call that waits for a write to end. While some are under way the thread looks at them, less and
    less often the older they become; while none is, it sleeps until there is one.
    """

    def __init__(
        self,
        pages: Tensor,  # [layers, pages, page_bytes] uint8, contiguous, in CPU or CUDA memory
        incarnation: int,
        marks: LayerMarks | None = None,
    ) -> None:
        """`incarnation`: ours. `marks`: of an engine that writes a pool in CUDA memory; else its current stream tells.
        Takes up to a second. ConfigError (transport) where NIXL cannot be used.
        """
        self._marks = marks
        self.tensor = pages
        self.layers, self.pages, self.page_bytes = pages.shape
        self.agent = NixlAgent(agent_name(incarnation))
        self.agent.register(pages)
        self._stream = torch.cuda.Stream(pages.device) if pages.is_cuda else None  # type: ignore[no-untyped-call]
        self._news: queue.SimpleQueue[Write | Callable[[], None] | None] = queue.SimpleQueue()
        self._running: list[Write] = []  # by the thread only, as all that follows
        self._leaving: set[str] = set()
        self._thread = threading.Thread(target=self._run, name="kv-nixl", daemon=True)
        self._thread.start()

    @property
    def address(self) -> int:
        """Of the pool."""
        return self.tensor.data_ptr()

    @property
    def device(self) -> int:
        """Its number as NIXL counts."""
        return device_of(self.tensor)

    def mark(self, layer: int) -> torch.cuda.Event | None:
        """What is launched so far of that layer's writes, as an event; None in CPU memory, where all is done."""
        if self._stream is None:
            return None
        if self._marks is not None:
            return self._marks.of(layer)
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.tensor.device))
        return event

    def post(self, write: Write) -> None:
        """Begins it soon; its end is told once."""
        self._news.put(write)

    def call(self, action: Callable[[], None]) -> None:
        """Runs it on the thread, behind what was posted."""
        self._news.put(action)

    def leave(self, peer: str) -> None:
        """On the thread: disconnects from a peer once no write to it is under way."""
        self._leaving.add(peer)

    def close(self) -> None:
        """Ends the thread and the agent. Writes that are under way are told no more. May be called again."""
        self._news.put(None)
        self._thread.join()
        self.agent.close()

    def _run(self) -> None:
        if self._stream is not None:
            torch.cuda.set_device(self.tensor.device)
        while True:
            for item in self._take():
                if item is None:
                    return
                try:
                    self._begin(item) if isinstance(item, Write) else item()
                except Exception:
                    log.exception("the NIXL thread")
            try:
                self._look()
            except Exception:
                log.exception("the NIXL thread")

    def _take(self) -> list[Write | Callable[[], None] | None]:
        """All that came; waits for it, no longer than until the next look at what is under way."""
        try:
            items = [self._news.get(timeout=self._pause() if self._running else None)]
        except queue.Empty:
            return []
        while not self._news.empty():
            items.append(self._news.get())
        return items

    def _pause(self) -> float:
        youngest = max(write.begun for write in self._running)
        return min(max((time.monotonic() - youngest) / _SHARE, _SHORTEST_S), _LONGEST_S)

    def _begin(self, write: Write) -> None:
        try:
            if write.ready is not None:
                write.ready.synchronize()
            write.begun = time.monotonic()
            write.handle = self.agent.write(
                write.peer,
                write.local,
                write.remote,
                local_cuda=self.tensor.is_cuda,
                remote_cuda=write.remote_cuda,
            )
        except Exception as error:
            log.warning("%s", error)
            write.ended(write, False)
            return
        self._running.append(write)
        if write.copy is not None:
            write.digests = self._digests(write.copy)

    def _look(self) -> None:
        for write in tuple(self._running):
            try:
                landed = self.agent.landed(write.handle)
            except Unavailable as error:
                log.warning("%s: %s", write.peer, error)
                self._over(write, False)
                continue
            if landed:
                self._over(write, True)
        for peer in self._leaving - {write.peer for write in self._running}:
            self._leaving.discard(peer)
            self.agent.remove(peer)

    def _over(self, write: Write, landed: bool) -> None:
        self._running.remove(write)
        write.took = time.monotonic() - write.begun
        if not self.agent.release(write.handle):
            log.warning("%s: NIXL keeps the record of a write", write.peer)
        try:
            write.ended(write, landed)
        except Exception:
            log.exception("what followed a write failed")

    def _digests(self, copy: Copy) -> bytes:
        if self._stream is None:
            return source_digests(self.tensor, copy)
        from ..kernels.gpu.page_digest import digest_pages  # Triton is not installed where a CPU serves

        with torch.cuda.stream(self._stream):
            out = torch.zeros((1, len(copy.src)), dtype=torch.int64, device=self.tensor.device)
            ids = torch.tensor(copy.src, dtype=torch.int32, device=self.tensor.device)
            layer = self.tensor[copy.layer : copy.layer + 1].view(torch.int64)
            digest_pages(layer, ids, out, ticket=copy.ticket, first_layer=copy.layer, ordinal=copy.ordinal)
            return out.cpu().numpy().tobytes()
