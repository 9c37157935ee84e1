"""What an idle decode worker does while the KV of a prompt comes: it goes the ways that it will go once it is there."""

import time
from collections.abc import Callable, Sequence
from itertools import cycle

from .handover import NEAR_S

EVERY_S = 0.001


class Rehearsal:
    """Code and data that were not used for some milliseconds are in no cache any more: then a launch takes half a
    millisecond, and a fifth of that when one like it has just been made. On the engine's thread.
    """

    def __init__(self, ways: Sequence[Callable[[], None]], clock: Callable[[], float] = time.monotonic) -> None:
        """`ways`: each harmless at any time at which no step is on its way."""
        self.until = 0.0  # so long the engine's thread does not sleep
        self._ways = cycle(ways)
        self._clock = clock
        self._next = float("inf")

    def near(self, *, rest: bool) -> None:
        """The last layers come soon, or (`rest`) are there: then the rest comes any moment, and must not be held up."""
        now = self._clock()
        self.until, self._next = now + NEAR_S, float("inf") if rest else now

    def over(self) -> None:
        """It is there."""
        self.until, self._next = 0.0, float("inf")

    def go(self) -> None:
        """One of the ways, if it is time."""
        if self._clock() >= self._next:
            next(self._ways)()
            self._next = self._clock() + EVERY_S
