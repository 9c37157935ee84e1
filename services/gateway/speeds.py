"""What a gateway learns of its workers' speeds: estimates whose evidence fades, so that they follow what changes.

Where nothing was seen for a while, an estimate goes back to what would be expected otherwise. Whoever was avoided
because of a bad figure is therefore tried again, and measured again.
"""

from dataclasses import dataclass, field

HALF_LIFE_S = 15.0  # after which evidence counts for half
PRIOR_S = 0.05  # an expected rate weighs as much as one seen for so many seconds of work
PRIOR_COPIES = 0.5  # an expected delay weighs as much as so many seen ones
OUTLIER = 4.0  # a delay counts for at most so many times what was expected,
OUTLIER_S = 0.05  # or for this


def faded(since: float, now: float) -> float:
    """What is left of evidence, as a share; seconds."""
    return float(0.5 ** (max(0.0, now - since) / HALF_LIFE_S))


@dataclass(slots=True)
class Rate:
    """Prompt tokens a second of one worker."""

    _tokens: float = 0.0
    _seconds: float = 0.0
    _at: float = 0.0

    def add(self, tokens: float, seconds: float, now: float) -> None:
        """It computed so many in so many seconds of work."""
        if tokens <= 0 or seconds <= 0:
            return
        left = faded(self._at, now)
        self._tokens = left * self._tokens + tokens
        self._seconds = left * self._seconds + seconds
        self._at = now

    @property
    def last(self) -> float | None:
        """By what was seen, however old; None: nothing was."""
        return self._tokens / self._seconds if self._seconds > 0 else None

    def evidence(self, now: float) -> float:
        """Seconds of work that it was seen for, the older ones counting less."""
        return faded(self._at, now) * self._seconds

    def expected(self, now: float, prior: float | None) -> float | None:
        """By what was seen; the older that is, the more by `prior`. None where there is neither."""
        if prior is None or self.last is None:
            return self.last or prior
        left = faded(self._at, now)
        return (left * self._tokens + PRIOR_S * prior) / (left * self._seconds + PRIOR_S)


@dataclass(slots=True)
class Delay:
    """How long the second token waits for KV that is still on its way, by the bytes moved: a line through what was
    seen (least squares), its slope never negative."""

    _sums: list[float] = field(default_factory=lambda: [0.0] * 5)  # of 1, x, y, x * x, x * y; x: GB, y: seconds
    _at: float = 0.0

    def add(self, nbytes: float, seconds: float, now: float) -> None:
        """So long was waited for the KV of so many bytes. One that is far off what was expected is cut: a peer that
        was frozen once tells little, while a change will be told again."""
        if self._sums[0]:
            seconds = min(seconds, max(OUTLIER_S, OUTLIER * self._line(nbytes)))
        x, left = nbytes / 1e9, faded(self._at, now)
        seen = (1.0, x, seconds, x * x, x * seconds)
        self._sums = [left * old + new for old, new in zip(self._sums, seen, strict=True)]
        self._at = now

    def expected(self, nbytes: float, now: float, prior: float) -> float:
        """Seconds; the older the evidence, the more by `prior`."""
        count = faded(self._at, now) * self._sums[0]
        if not count:
            return prior
        return (count * self._line(nbytes) + PRIOR_COPIES * prior) / (count + PRIOR_COPIES)

    def _line(self, nbytes: float) -> float:
        count, x, y, xx, xy = self._sums
        mean_x, mean_y = x / count, y / count
        spread = xx / count - mean_x**2
        slope = max(0.0, (xy / count - mean_x * mean_y) / spread) if spread > 1e-4 * mean_x**2 else 0.0
        return max(0.0, mean_y + slope * (nbytes / 1e9 - mean_x))
