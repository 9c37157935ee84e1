"""Bounded memories of identifiers."""

from collections.abc import Hashable

MAX_GAPS = 1024


class SeenIds:
    """Which of the rising ids 1, 2, ... have been seen: the highest one, and the few below it that have not.

    Of more than `MAX_GAPS` missing ids the lowest count as seen: a ticket refused costs one prefill, a ticket taken
    twice would cost someone's pages.
    """

    def __init__(self) -> None:
        """Nothing seen."""
        self._highest = 0
        self._gaps: set[int] = set()

    def fresh(self, number: int) -> bool:
        """Notes `number` as seen; whether it was not before. Numbers below 1 never are fresh."""
        if number > self._highest:
            self._gaps.update(range(max(self._highest + 1, number - MAX_GAPS), number))
            self._highest = number
            if len(self._gaps) > MAX_GAPS:
                self._gaps = set(sorted(self._gaps)[-MAX_GAPS:])
            return True
        if number in self._gaps:
            self._gaps.discard(number)
            return True
        return False


class Recent:
    """The latest `size` things that were added."""

    def __init__(self, size: int) -> None:
        """Empty."""
        self._size = size
        self._items: dict[Hashable, None] = {}

    def __contains__(self, item: Hashable) -> bool:
        return item in self._items

    def __len__(self) -> int:
        return len(self._items)

    def add(self, item: Hashable) -> None:
        """Makes `item` the latest; the oldest may fall out."""
        self._items.pop(item, None)
        self._items[item] = None
        if len(self._items) > self._size:
            del self._items[next(iter(self._items))]

    def discard(self, item: Hashable) -> None:
        """Forgets `item`, if known."""
        self._items.pop(item, None)
