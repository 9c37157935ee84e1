"""Writes a call's messages from a task of its own, so that its request can end at once while a write waits."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType
from typing import Generic, TypeVar

from ....errors import Overloaded

T = TypeVar("T")


class Outlet(Generic[T]):
    """For one who puts. Between `put` and the transport is what one `put` gave, and no more; use it in `async with`."""

    def __init__(self, write: Callable[[T], Awaitable[None]]) -> None:
        """`write` returns once the transport took the message."""
        self.begun = False  # something was put
        self._write = write
        self._waiting: list[T] = []
        self._work = asyncio.Event()  # something waits
        self._room = asyncio.Event()  # nothing waits
        self._still = asyncio.Event()  # nothing is being written either
        self._room.set()
        self._still.set()
        self._error: BaseException | None = None
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "Outlet[T]":
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Drops what was not written. `write` may hold a cancel up for as long as its transport must not be left."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def put(self, messages: Sequence[T]) -> None:
        """Hands messages over, in order; waits until the ones before are with the transport, or about to be. Raises
        what writing raised."""
        await self._room.wait()
        self._check()
        if messages:
            self.begun = True
            self._waiting = list(messages)
            self._room.clear()
            self._still.clear()
            self._work.set()

    async def end(self, messages: Sequence[T], seconds: float) -> None:
        """Hands the last ones over and waits until the transport took everything. Overloaded where the client does not
        read for so long."""
        scope = asyncio.timeout(seconds)
        try:
            async with scope:
                await self.put(messages)
                await self._still.wait()
        except TimeoutError:
            if not scope.expired():
                raise
            raise Overloaded("the client reads too slowly") from None
        self._check()

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    async def _run(self) -> None:
        try:
            while True:
                await self._work.wait()
                self._work.clear()
                messages, self._waiting = self._waiting, []
                self._room.set()
                for message in messages:
                    await self._write(message)
                if not self._waiting:
                    self._still.set()
        except BaseException as error:  # gRPC says by a cancel of its own that the call is over
            self._error = error
            if not isinstance(error, Exception):
                raise
        finally:
            self._room.set()
            self._still.set()
