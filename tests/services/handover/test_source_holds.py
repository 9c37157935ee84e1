"""Pages that copies read: one hold for all layers, for as long as any of them is under way."""

import pytest

from twostroke.engine.block_pool import BlockPool
from twostroke.kvtransfer.messages import Copy
from twostroke.services.handover.source_holds import SourceHolds


def copy(number: int, src: tuple[int, ...], *, ticket: int = 1, layer: int = 0) -> Copy:
    return Copy(number, 9, ticket, layer, 0, src, src)


def test_pages_come_back_with_the_last_copy() -> None:
    pool = BlockPool(10)
    pages = tuple(pool.allocate(3))
    holds = SourceHolds(pool)
    holds.begin([copy(layer, pages, layer=layer) for layer in range(3)])
    holds.begin([copy(3, pages, layer=3)])
    holds.begin([])
    assert len(pool.holds()) == 1
    pool.release(pages)
    for layer in (2, 0, 3):
        holds.end([layer])
        assert pool.free_pages == 6
    holds.end([1])
    assert (pool.free_pages, len(holds), pool.holds()) == (9, 0, {})
    holds.end([1])  # told twice


def test_stretches_and_tickets_are_held_apart() -> None:
    pool = BlockPool(10)
    pages = tuple(pool.allocate(4))
    holds = SourceHolds(pool)
    holds.begin([copy(1, pages[:2])])
    holds.begin([copy(2, pages[2:])])
    holds.begin([copy(3, pages[:2], ticket=2)])
    pool.release(pages)
    holds.end([1])
    assert pool.free_pages == 5  # the other ticket still reads them
    holds.end([3])
    assert pool.free_pages == 7
    holds.end([2])
    assert pool.free_pages == 9


def test_pages_that_nobody_owns_are_a_fault_that_stops_nothing(caplog: pytest.LogCaptureFixture) -> None:
    pool = BlockPool(10)
    holds = SourceHolds(pool)
    holds.begin([copy(1, (5,))])
    assert "nobody owns" in caplog.text
    holds.end([1])
    assert pool.free_pages == 9
