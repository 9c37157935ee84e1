"""Messages that are begun at once and waited for when the next one is to be written.

A stream's transport has taken a message at once, unless its window is full. To wait for word of that would wake the
stream's task twice for each token, and the loop some rounds more; a failure is told with the next message instead.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

M = TypeVar("M")


class WriteBehind(Generic[M]):
    """One at a time writes. `settle` before the stream ends."""

    def __init__(self, write: Callable[[M], Coroutine[Any, Any, None]]) -> None:
        """`write`: waits for futures only, and needs no task of its own."""
        self._write = write
        self._under_way: Coroutine[Any, Any, None] | None = None
        self._until: asyncio.Future[Any]  # what the message under way waits for

    async def write(self, message: M) -> None:
        """Begins a message once the last one is written. Raises what either's writing raised."""
        if self._under_way is not None:
            await self.settle()
        self._under_way = self._write(message)
        self._go_on(self._under_way)

    async def settle(self) -> None:
        """Until the last message is written. Raises what its writing raised; a cancel leaves it under way."""
        while (under_way := self._under_way) is not None:
            if not self._until.done():
                await asyncio.wait([self._until])
            self._go_on(under_way)

    def close(self) -> None:
        """Forgets a message that is under way: nobody waits for its end."""
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            under_way.close()

    def _go_on(self, under_way: Coroutine[Any, Any, None]) -> None:
        """To the next future that it waits for, as its task would."""
        try:
            until = under_way.send(None)
        except StopIteration:
            self._under_way = None
        except BaseException:
            self._under_way = None
            raise
        else:
            until._asyncio_future_blocking = False  # what a task says to a future that it got
            self._until = until
