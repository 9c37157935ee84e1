"""SIGTERM and SIGINT of a process that drains: the first asks it to finish, the second to end."""

import asyncio
import logging
import signal
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")
SIGNALS = (signal.SIGTERM, signal.SIGINT)

log = logging.getLogger(__name__)


class Stopping:
    """Counts the signals of this process from `install` to `remove`. After the second, the next one kills outright."""

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()

    def install(self) -> None:
        """On the running loop, which must be the main thread's."""
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.add_signal_handler(number, self.signalled, signal.Signals(number).name)

    def remove(self) -> None:
        """Back to the system's way. Idempotent."""
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.remove_signal_handler(number)

    def signalled(self, name: str) -> None:
        """One came."""
        if not self.first.is_set():
            log.info("%s: finishing what runs, taking nothing new (once more: end at once)", name)
            self.first.set()
        else:
            log.warning("%s again: ending at once", name)
            self.second.set()
            self.remove()


async def unless(event: asyncio.Event, work: Awaitable[T]) -> T | None:
    """The result of `work`, or None, and `work` cancelled, if `event` is set first. Raises what `work` raises."""
    task = asyncio.ensure_future(work)
    waiter = asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait((task, waiter), return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        waiter.cancel()
        if not task.done():
            task.cancel()
        await asyncio.gather(task, waiter, return_exceptions=True)
