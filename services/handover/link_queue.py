"""What waits to be sent on one link: bounded, and never silent for long."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Generic, TypeVar

from ...errors import Unavailable

M = TypeVar("M")
Wire = TypeVar("Wire")

LIMIT = 4096
HEARTBEAT_S = 1.0


class LinkQueue(Generic[M]):
    """Messages for one stream of one link. On the event loop."""

    def __init__(
        self, *, limit: int = LIMIT, heartbeat_s: float = HEARTBEAT_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`limit`: messages; a peer that lets more pile up loses the stream, and the machines repeat what matters."""
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.overflowed = False
        self._limit = limit
        self._heartbeat_s = heartbeat_s
        self._clock = clock
        self._messages: list[M] = []
        self._wake = asyncio.Event()
        self._next_heartbeat = clock()

    def put(self, messages: Iterable[M]) -> None:
        """Adds messages, or ends the queue where they are too many. Ignored once it ended."""
        if self.ended.done():
            return
        self._messages.extend(messages)
        if len(self._messages) > self._limit:
            self.overflowed = True
            self.end()
        self._wake.set()

    def end(self) -> None:
        """The stream is over; what was not sent is dropped. Idempotent."""
        if not self.ended.done():
            self.ended.set_result(None)
        self._messages.clear()
        self._wake.set()

    async def take(self) -> tuple[list[M], bool] | None:
        """All that waits and whether a heartbeat is due, as soon as there is either; None at the end. One consumer."""
        if not self._messages and not self.ended.done():
            self._wake.clear()
            try:
                async with asyncio.timeout(max(0.0, self._next_heartbeat - self._clock())):
                    await self._wake.wait()
            except TimeoutError:
                pass
        if self.ended.done():
            return None
        messages, self._messages = self._messages, []
        now = self._clock()
        due = now >= self._next_heartbeat
        if due:
            self._next_heartbeat = now + self._heartbeat_s
        return messages, due

    async def pump(
        self,
        write: Callable[[Wire], Awaitable[None]],
        encode: Callable[[M], Wire],
        heartbeat: Callable[[int], Wire],
    ) -> None:
        """Moves what comes to `write`, in order, with a heartbeat (numbered from 1) first and then each interval."""
        sequence = 0
        while (batch := await self.take()) is not None:
            messages, due = batch
            if due:
                sequence += 1
                await write(heartbeat(sequence))
            for message in messages:
                await write(encode(message))

    async def run(self, receive: Awaitable[None], send: Awaitable[None]) -> None:
        """Both directions of the stream until either is over or `end` is called; raises what either raised."""
        tasks = [asyncio.ensure_future(receive), asyncio.ensure_future(send)]
        try:
            await asyncio.wait([*tasks, self.ended], return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task.done():
                    task.result()
            if self.overflowed:
                raise Unavailable(f"more than {self._limit} messages wait on a link")
        finally:
            self.end()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
