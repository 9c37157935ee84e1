"""Ends the coroutine that a request lives in, from outside: at its deadline, or when its client reads too slowly."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from ...errors import DeadlineExceeded, Overloaded, TwostrokeError
from .generation import Piece, Send

FINISH_S = 0.5  # for a message that is being written to leave before its request ends: a call takes one at a time


class SlowReader(Overloaded):
    """The client does not read what it asked for."""


class Guard:
    """For one request, one task and those that it waits for."""

    def __init__(self, timeout_s: float | None, slow_reader_s: float, *, alone: bool = False) -> None:
        """`timeout_s`: left until the deadline. `slow_reader_s`: the longest that one write may take. `alone`: one task
        writes."""
        self._timeout_s = timeout_s
        self._slow_reader_s = slow_reader_s
        self._loop = asyncio.get_running_loop()
        self._scope: asyncio.Timeout | None = None
        self._error: TwostrokeError | None = None
        self._writing_since: float | None = None
        self._watch: asyncio.TimerHandle | None = None
        self._cut: asyncio.TimerHandle | None = None
        self._turn = None if alone else asyncio.Lock()

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """The body is cancelled at the deadline (DeadlineExceeded) or by `end` (its error)."""
        deadline: asyncio.TimerHandle | None = None
        if self._timeout_s is not None:
            deadline = self._loop.call_later(self._timeout_s, self.end, DeadlineExceeded("the deadline passed"))
        scope = asyncio.timeout(None)
        try:
            async with scope:
                self._scope = scope
                yield
        except TimeoutError:
            if self._error is None or not scope.expired():
                raise
            raise self._error from None
        finally:
            self._scope = None
            for timer in (deadline, self._watch, self._cut):
                if timer is not None:
                    timer.cancel()

    def end(self, error: TwostrokeError) -> None:
        """Makes the body end with this error, wherever it waits; the first one counts. A message that is being written
        is let out, for a while, as none can be told behind one that is broken off."""
        if self._scope is None or self._error is not None:
            return
        self._error = error
        if self._writing_since is None or isinstance(error, SlowReader):
            self._stop()
        else:
            self._cut = self._loop.call_later(FINISH_S, self._stop)

    def _stop(self) -> None:
        if self._scope is not None and not self._scope.expired():
            self._scope.reschedule(self._loop.time())

    def too_slow(self) -> None:
        """The client does not keep up."""
        self.end(SlowReader("the client reads too slowly"))

    async def write(self, send: Send, piece: Piece) -> None:
        """Sends a piece under watch; one at a time, where several answers are written. Raises what ended the request
        meanwhile.

        The timer outlives the write, as setting one for every token costs more.
        """
        if self._turn is not None:
            await self._turn.acquire()
        try:
            if self._error is not None:
                raise self._error
            self._writing_since = self._loop.time()
            if self._watch is None:
                self._watch = self._loop.call_later(self._slow_reader_s, self._look)
            await send(piece)
        finally:
            self._writing_since = None
            if self._turn is not None:
                self._turn.release()
        if self._error is not None:
            self._stop()
            if piece.finish is None:
                raise self._error

    async def still(self) -> None:
        """Until no other answer is being written, for a while; none is from then on. For one that fails: its siblings
        are broken off next."""
        if self._turn is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(FINISH_S):
                    await self._turn.acquire()

    def _look(self) -> None:
        self._watch = None
        if self._writing_since is None:
            return
        left = self._writing_since + self._slow_reader_s - self._loop.time()
        if left > 0:
            self._watch = self._loop.call_later(left, self._look)
        else:
            self.too_slow()
