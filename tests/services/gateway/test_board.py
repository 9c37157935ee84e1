"""What is inside several processes, and one queue for all of them."""

import pytest

from twostroke.errors import Overloaded
from twostroke.services.gateway.admission import Admission
from twostroke.services.gateway.board import CELL_BYTES, Board, Cell

COUNT = 3


def boards() -> list[Board]:
    cells = memoryview(bytearray(COUNT * len(Cell) * CELL_BYTES)).cast("q")
    return [Board(cells, index, COUNT) for index in range(COUNT)]


def test_each_writes_its_row_and_reads_all() -> None:
    rows = boards()
    for index, row in enumerate(rows):
        row.tell(Cell.TOKENS, 10**index)
        row.tell(Cell.UP, index % 2)
    assert {row.total(Cell.TOKENS) for row in rows} == {111}
    assert {row.total(Cell.PLACES) for row in rows} == {0}
    assert [rows[0].of(index, Cell.UP) for index in range(COUNT)] == [0, 1, 0]
    alone = Board()
    alone.tell(Cell.PLACES, 3)
    assert alone.total(Cell.PLACES) == alone.of(0, Cell.PLACES) == 3


def test_places_are_those_of_all() -> None:
    first, second, third = (Admission(4, board=board) for board in boards())
    with first.slot(2), second.slot(2):
        with pytest.raises(Overloaded, match="4 requests are being served already"), third.slot():
            pass
        assert (first.inside, third.inside, third.board.total(Cell.INSIDE)) == (2, 0, 4)
    with third.slot(4):
        assert first.queue.all_places == 4
    assert third.board.total(Cell.PLACES) == third.board.total(Cell.INSIDE) == 0


def test_tokens_are_those_of_all() -> None:
    first, second, third = (Admission(10, board=board, max_tokens=lambda: 100) for board in boards())
    with first.slot() as big:
        big.expect(1000, 10)  # nobody is inside: it is never too large
        with second.slot() as small, pytest.raises(Overloaded, match="1010 tokens are to be computed for"):
            small.expect(1, 1)
        big.took(0, 1)  # the prompt is done
        assert third.queue.all_tokens == 9
        with third.slot() as fits:
            fits.expect(80, 11)
            assert first.queue.all_tokens == 100
    assert first.queue.all_tokens == 0


def test_the_urgent_displace_in_their_own_process() -> None:
    first, second, _ = (Admission(2, board=board) for board in boards())
    gone: list[str] = []
    with first.slot(priority=5) as near, second.slot(priority=5) as far:
        near.displaceable(lambda: gone.append("near"))
        far.displaceable(lambda: gone.append("far"))
        near.expect(5, 5)
        far.expect(5, 5)
        with first.slot(priority=0):
            assert gone == ["near"]
            with pytest.raises(Overloaded), first.slot(priority=0):
                pass
    assert first.queue.all_places == 0
