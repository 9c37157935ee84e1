"""What partly filled pages cost, and which page size would suit. No torch.

A sequence fills its last page by half on average, so large pages lose positions: p / 2 a sequence. Small pages cost
otherwise: each has a record, an entry in a block table, a place in the hash chain and a piece of every transfer. That
is taken for as much as one position (PAGE_COST), an estimate which no measurement is behind. So a sequence of L tokens
costs p / 2 + PAGE_COST * L / p positions, least at p = sqrt(2 * PAGE_COST * L).
"""

from collections.abc import Iterable, Sequence
from typing import Protocol

PAGE_SIZES = (16, 32, 64, 128)
PAGE_COST = 1.0  # positions a page
LOOK_EVERY = 16  # calls: a look costs some 0.1 us a sequence
HORIZON = 1024  # looks after which one counts for 1/e


class Placed(Protocol):
    """What is looked at of a sequence."""

    @property
    def pages(self) -> Sequence[int]:
        """Its block table."""

    @property
    def base(self) -> int:
        """Tokens of its prompt, and of output that was computed elsewhere."""

    @property
    def computed(self) -> int:
        """Positions below are written."""


class PageUse:
    """Gauges of a running engine."""

    def __init__(self, page_size: int) -> None:
        """`page_size`: tokens."""
        self._page_size = page_size
        self._calls = 0
        self._looks = 0
        self.covered = 0  # positions that block tables cover; a page that two share counts twice
        self.unused = 0  # of these, positions without a token: at the ends of last pages, and pages set aside
        self.mean_length = 0.0  # tokens of a sequence, over time; 0: none was seen

    def look(self, sequences: Iterable[Placed]) -> None:
        """Call each step with the sequences that own pages; every LOOK_EVERY-th call looks at them."""
        self._calls += 1
        if self._calls % LOOK_EVERY == 1:
            self._look(sequences)

    def _look(self, sequences: Iterable[Placed]) -> None:
        count = pages = tokens = 0
        for sequence in sequences:
            count += 1
            pages += len(sequence.pages)
            tokens += max(sequence.base, sequence.computed)  # a prompt's pages are filled or about to be
        self.covered = pages * self._page_size
        self.unused = max(0, self.covered - tokens)
        if count:
            self._looks = min(self._looks + 1, HORIZON)
            self.mean_length += (tokens / count - self.mean_length) / self._looks


def suited_page_size(mean_length: float) -> int:
    """The page size that costs least where sequences have `mean_length` tokens, over time; 0 where none was seen."""
    if mean_length <= 0:
        return 0
    return min(PAGE_SIZES, key=lambda size: size / 2 + PAGE_COST * mean_length / size)


def lost_share(page_size: int, first: int, last: int) -> float:
    """Share of the positions of its pages that a sequence leaves empty while it grows from `first` to `last` tokens."""
    covered = sum(-(-length // page_size) * page_size for length in range(first, last + 1))
    used = (first + last) * (last - first + 1) // 2
    return 1 - used / covered
