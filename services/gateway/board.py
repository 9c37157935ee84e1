"""What each gateway process has inside, in plain numbers that all those on the same addresses read."""

from enum import IntEnum, auto

CELL_BYTES = 8


class Cell(IntEnum):
    """What is told."""

    PLACES = 0
    """Taken in the queue."""
    TOKENS = auto()
    """Charged to the queue."""
    INSIDE = auto()
    """Answers under way."""
    PROMPT = auto()
    """Tokens of prompts, so far."""
    CACHED = auto()
    """Of these, found in a prefix cache."""
    UP = auto()
    """1: it can be called by the others."""


class Board:
    """A row of cells a process. Each writes its own row alone, so that no two ever write the same number."""

    def __init__(self, cells: memoryview | None = None, index: int = 0, count: int = 1) -> None:
        """`cells`: of `count` rows, format q; None: of this process alone. `index`: of its own row."""
        self._cells = memoryview(bytearray(len(Cell) * CELL_BYTES)).cast("q") if cells is None else cells
        self._own = index * len(Cell)
        self._end = count * len(Cell)

    def tell(self, cell: Cell, value: int) -> None:
        """Of this process."""
        self._cells[self._own + cell] = value

    def total(self, cell: Cell) -> int:
        """Of all processes."""
        return sum(self._cells[cell : self._end : len(Cell)])

    def of(self, index: int, cell: Cell) -> int:
        """Of one process."""
        return self._cells[index * len(Cell) + cell]
