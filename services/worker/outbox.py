"""Messages that wait for a stream: bounded in bytes, so that a peer that does not read costs bounded memory."""

import asyncio
from collections import deque
from typing import Generic, Protocol, TypeVar


class Sized(Protocol):
    """A protobuf message."""

    def ByteSize(self) -> int:  # noqa: N802 - protobuf's name
        """Bytes on the wire."""
        ...


M = TypeVar("M", bound=Sized)


class Outbox(Generic[M]):
    """First in, first out; one reader. `put` never waits. Used on one event loop."""

    def __init__(self, limit: int) -> None:
        """`limit`: bytes that may wait, the message being written counted in; a single larger one still passes."""
        self._limit = limit
        self._waiting: deque[tuple[M, int]] = deque()
        self._bytes = 0
        self._changed = asyncio.Event()
        self._closed = False

    @property
    def empty(self) -> bool:
        """Nothing waits, and what was taken has been written."""
        return self._bytes == 0

    @property
    def free(self) -> int:
        """Bytes that may still be put."""
        return max(0, self._limit - self._bytes)

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def put(self, message: M) -> bool:
        """Appends a message. False, and nothing is kept, when it does not fit or the box is closed."""
        size = max(1, message.ByteSize())
        if self._closed or (self._bytes and self._bytes + size > self._limit):
            return False
        self._waiting.append((message, size))
        self._bytes += size
        self._changed.set()
        return True

    async def take(self) -> tuple[M, int] | None:
        """The next message and what to hand to `written` once it left. None: closed, and nothing waits any more."""
        while not self._waiting:
            if self._closed:
                return None
            self._changed.clear()
            await self._changed.wait()
        return self._waiting.popleft()

    def written(self, size: int) -> None:
        """A taken message has left."""
        self._bytes -= size

    def close(self, *, flush: bool = False) -> None:
        """Takes nothing more; what waits is dropped, or with `flush` still handed out."""
        self._closed = True
        if not flush:
            self._bytes -= sum(size for _, size in self._waiting)
            self._waiting.clear()
        self._changed.set()
