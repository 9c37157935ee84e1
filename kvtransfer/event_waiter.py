"""A thread that waits for a device's events, so that no other has to."""

import logging
import queue
import threading
from collections.abc import Callable
from typing import Protocol, TypeAlias

log = logging.getLogger(__name__)

_JOIN_S = 10.0  # a device that hangs does not keep the process

Seen: TypeAlias = Callable[[Exception | None], None]
"""The event has happened, or the device failed; on the waiter's thread."""


class Waitable(Protocol):
    """A marker on a stream."""

    def synchronize(self) -> object:
        """Blocks until the device has come to it; raises when the device failed."""
        ...


class EventWaiter:
    """Waits for one event after another, in the order in which they were added: those of one stream happen so."""

    def __init__(self, name: str, begin: Callable[[], None] = lambda: None) -> None:
        """`begin`: called first on the thread (to choose the device)."""
        self._begin = begin
        self._events: queue.SimpleQueue[tuple[Waitable, Seen] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def add(self, event: Waitable, seen: Seen) -> None:
        """`seen` is called once, after those of all events that were added before."""
        self._events.put((event, seen))

    def close(self) -> None:
        """Ends the thread once it has seen all that was added. May be called again."""
        self._events.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(_JOIN_S)

    def _run(self) -> None:
        try:
            self._begin()
        except Exception:
            log.exception("the waiter's thread could not be prepared")  # each event will say what is wrong
        while (item := self._events.get()) is not None:
            event, seen = item
            error: Exception | None = None
            try:
                event.synchronize()
            except Exception as caught:
                error = caught
            try:
                seen(error)
            except Exception:
                log.exception("what followed an event failed")
