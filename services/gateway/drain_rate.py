"""How fast a gateway empties: what leaves it in a second while anything is inside. Evidence fades."""

import time
from collections.abc import Callable

from .speeds import faded

FOLD_S = 1.0  # time over which what left is added up before it counts as evidence
ENOUGH_S = 1.0  # of evidence, before which nothing is known


class DrainRate:
    """Tokens and places that were done with, by the second."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._now = [0.0, 0.0]  # tokens and places that left since `_folded`
        self._busy_since: float | None = None
        self._busy_s = 0.0  # since `_folded`, less what began at `_busy_since`
        self._folded = clock()
        self._sums = [0.0, 0.0]  # faded, as is `_seconds`
        self._seconds = 0.0
        self._seen_s = 0.0  # not faded

    def busy(self, on: bool) -> None:
        """Something is inside, or no longer: idle time says nothing about how fast it would go."""
        now = self._clock()
        if on and self._busy_since is None:
            self._busy_since = now
        elif not on and self._busy_since is not None:
            self._busy_s += now - self._busy_since
            self._busy_since = None

    def left(self, tokens: int, places: int = 0) -> None:
        """So many are done with."""
        self._now[0] += tokens
        self._now[1] += places
        if self._clock() - self._folded >= FOLD_S:
            self._fold()

    @property
    def tokens(self) -> float | None:
        """A second; None: not known."""
        return self._rate(0)

    @property
    def places(self) -> float | None:
        """A second; None: not known."""
        return self._rate(1)

    def _rate(self, which: int) -> float | None:
        if self._clock() - self._folded >= FOLD_S:
            self._fold()
        known = self._seen_s >= ENOUGH_S and self._sums[which] > 0
        return self._sums[which] / self._seconds if known else None

    def _fold(self) -> None:
        now = self._clock()
        seconds, self._busy_s = self._busy_s, 0.0
        if self._busy_since is not None:
            seconds += now - self._busy_since
            self._busy_since = now
        share = faded(self._folded, now) if seconds else 1.0  # idle, nothing becomes known
        self._sums = [share * old + new for old, new in zip(self._sums, self._now, strict=True)]
        self._seconds = share * self._seconds + seconds
        self._seen_s += seconds
        self._now, self._folded = [0.0, 0.0], now
