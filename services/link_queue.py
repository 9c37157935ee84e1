"""What waits to be sent on one link: bounded, and never silent for long."""

import asyncio
import time
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

M = TypeVar("M")

LIMIT = 4096
HEARTBEAT_S = 1.0


class LinkQueue(Generic[M]):
    """Messages for one stream of one link. On the event loop, one consumer."""

    def __init__(
        self, *, limit: int = LIMIT, heartbeat_s: float = HEARTBEAT_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`limit`: messages; a peer that lets more pile up loses the stream, and the machines repeat what matters."""
        self.overflowed = False
        self.closed = False
        self._limit = limit
        self._heartbeat_s = heartbeat_s
        self._clock = clock
        self._messages: list[M] = []
        self._wake = asyncio.Event()
        self._next_heartbeat = clock()

    def put(self, messages: Iterable[M]) -> None:
        """Adds messages, or closes the queue where they are too many. Ignored once closed."""
        if self.closed:
            return
        self._messages.extend(messages)
        if len(self._messages) > self._limit:
            self.overflowed = True
            self.close()
        self._wake.set()

    def close(self) -> None:
        """Ends the stream; what was not sent is dropped. Idempotent."""
        self.closed = True
        self._messages.clear()
        self._wake.set()

    async def take(self) -> tuple[list[M], bool] | None:
        """All that waits and whether a heartbeat is due, as soon as there is either; None once closed."""
        if not self._messages and not self.closed:
            self._wake.clear()
            try:
                async with asyncio.timeout(max(0.0, self._next_heartbeat - self._clock())):
                    await self._wake.wait()
            except TimeoutError:
                pass
        if self.closed:
            return None
        messages, self._messages = self._messages, []
        now = self._clock()
        due = now >= self._next_heartbeat
        if due:
            self._next_heartbeat = now + self._heartbeat_s
        return messages, due
