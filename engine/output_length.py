"""How long outputs are, of those that were seen."""

from math import ceil

FIRST_ESTIMATE = 128  # output tokens, until enough was seen
MEMORY = 64  # finished sequences over which the mean output length runs


class OutputLength:
    """Running mean of the output length of finished sequences, in tokens."""

    def __init__(self) -> None:
        self._seen = 0
        self._mean = float(FIRST_ESTIMATE)

    def observe(self, length: int) -> None:
        """A sequence ended by itself after `length` output tokens."""
        self._seen = min(self._seen + 1, MEMORY)
        self._mean += (length - self._mean) / self._seen

    def expected(self) -> int:
        """The mean, rounded up."""
        return ceil(self._mean)
