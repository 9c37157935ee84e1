"""Signs of life on a stream that has nothing to say yet: a proxy ends what looks dead."""

import asyncio
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Generic, TypeVar

from .guard import FINISH_S

M = TypeVar("M")


class KeepAlive(Generic[M]):
    """Writes messages, one at a time, and a sign of life after each `quiet_s` without any. Enter it for as long as the
    stream lives; one task writes, or several that take turns."""

    def __init__(self, write: Callable[[M], Awaitable[None]], sign: Callable[[], M], quiet_s: float) -> None:
        """`write` sends a message; `sign` makes one that says nothing. `quiet_s` 0: no signs."""
        self._write, self._sign, self._quiet_s = write, sign, quiet_s
        self._loop = asyncio.get_running_loop()
        self._spoke = self._loop.time()
        self._busy = False
        self._timer: asyncio.TimerHandle | None = None
        self._signing: asyncio.Task[None] | None = None
        self._error: Exception | None = None  # of a sign

    async def __aenter__(self) -> "KeepAlive[M]":
        if self._quiet_s > 0:
            self._timer = self._loop.call_later(self._quiet_s, self._look)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        signing = self._signing
        if signing is not None:
            try:
                await asyncio.wait([signing], timeout=FINISH_S)  # behind one that is broken off nothing can be told
            finally:
                signing.cancel()
            await asyncio.wait([signing])

    async def write(self, message: M) -> None:
        """Sends a message, after a sign that is on its way. Raises what either's writing raised."""
        self._busy = True
        try:
            if self._signing is not None:
                await self._signing
            if self._error is not None:
                raise self._error
            await self._write(message)
        finally:
            self._busy = False
            self._spoke = self._loop.time()

    def _look(self) -> None:
        """The timer outlives messages, as setting one for every token costs more."""
        if self._error is not None:
            return
        left = self._quiet_s  # where a message or a sign waits for the client to read
        if not self._busy and self._signing is None:
            left = self._spoke + self._quiet_s - self._loop.time()
            if left <= 0:
                left = self._quiet_s
                self._signing = self._loop.create_task(self._say(self._sign()))
        self._timer = self._loop.call_later(left, self._look)

    async def _say(self, sign: M) -> None:
        try:
            await self._write(sign)
        except Exception as error:  # the next write tells
            self._error = error
        finally:
            self._signing = None
            self._spoke = self._loop.time()
