"""Statistics of measured times: exact percentiles of up to a million values, a fair sample of more."""

import random
from array import array
from collections.abc import Sequence

KEPT = 1 << 20  # values; 8 MiB


def percentile(ordered: Sequence[float], percent: float) -> float:
    """The value below which `percent` of the sorted values lie, linear between the closest ranks.

    Rank `percent / 100 * (n - 1)` counted from 0: definition 7 of Hyndman and Fan, "Sample Quantiles in Statistical
    Packages" (1996), which numpy calls `linear`. ValueError without values or outside of 0 to 100.
    """
    if not ordered or not 0 <= percent <= 100:
        raise ValueError("a percentile needs values, and a share of 0 to 100")
    rank = percent / 100 * (len(ordered) - 1)
    below = int(rank)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (rank - below)


class Sample:
    """Values of one kind. Count, mean and maximum are of all; percentiles, beyond `kept` values, of a random sample."""

    def __init__(self, *, kept: int = KEPT, seed: int = 0) -> None:
        """`seed`: of the choice which values stay."""
        self._values, self._kept, self._random = array("d"), kept, random.Random(seed)
        self._ordered: list[float] | None = None
        self._total = 0.0
        self.count = 0
        self.largest = 0.0

    def add(self, value: float) -> None:
        """Vitter's algorithm R: each value stays with the same chance."""
        self.count += 1
        self._total += value
        self.largest = value if self.count == 1 else max(self.largest, value)
        self._ordered = None
        if len(self._values) < self._kept:
            self._values.append(value)
        elif (place := self._random.randrange(self.count)) < self._kept:
            self._values[place] = value

    @property
    def mean(self) -> float | None:
        """None without values."""
        return self._total / self.count if self.count else None

    @property
    def maximum(self) -> float | None:
        """None without values."""
        return self.largest if self.count else None

    def percentile(self, percent: float) -> float | None:
        """None without values."""
        if not self.count:
            return None
        if self._ordered is None:
            self._ordered = sorted(self._values)
        return percentile(self._ordered, percent)
