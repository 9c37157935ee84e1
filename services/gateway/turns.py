"""Turns of streams to write: a few each time that the loop comes round, whoever waited longest first.

So tokens that arrive while many streams have something to write join what waits, and a message holds the more of them
the less the loop keeps up; while it does, a turn is there at once.
"""

import asyncio
from collections import deque

AT_ONCE = 16  # messages; more cost less by the message, fewer let more tokens join
SHARE = 16  # at least one in so many of those who wait: a round that reads from hundreds of workers takes long


class Turns:
    """All streams of a loop share it."""

    def __init__(self, most: int = AT_ONCE) -> None:
        """`most`: turns each time that the loop comes round, where not too many wait."""
        self._most = most
        self._left = most
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._called = False

    def now(self) -> bool:
        """Takes a turn where one is free."""
        if self._left == 0 or self._waiting:
            return False
        self._left -= 1
        self._call()
        return True

    def queue(self, waiter: asyncio.Future[None]) -> None:
        """Ends the future when its turn comes, which is then taken. One that was cancelled takes none."""
        self._waiting.append(waiter)
        self._call()

    def _call(self) -> None:
        if not self._called:
            self._called = True
            asyncio.get_running_loop().call_soon(self._round)

    def _round(self) -> None:
        self._called = False
        self._left = turns = max(self._most, len(self._waiting) // SHARE)
        while self._waiting and self._left:
            waiter = self._waiting.popleft()
            if not waiter.done():
                waiter.set_result(None)
                self._left -= 1
        if self._left < turns:
            self._call()
