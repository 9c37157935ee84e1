"""BlockPool: one state a page, references, eviction order, holds and quarantine."""

import random
from itertools import pairwise

import pytest

from twostroke.engine.block_pool import BlockPool
from twostroke.errors import ConfigError, TwostrokeError


def digest(number: int) -> bytes:
    return number.to_bytes(16, "little")


def test_gives_out_every_page_but_the_sink_once() -> None:
    pool = BlockPool(6)
    assert (pool.pages, pool.usable, pool.free_pages) == (6, 5, 5)
    assert sorted(pool.allocate(5)) == [1, 2, 3, 4, 5]
    assert pool.free_pages == 0
    with pytest.raises(TwostrokeError, match="1 pages wanted, 0 free"):
        pool.allocate(1)


def test_a_refused_allocation_takes_nothing() -> None:
    pool = BlockPool(4)
    with pytest.raises(TwostrokeError):
        pool.allocate(4)
    assert pool.free_pages == 3


@pytest.mark.parametrize("pages", [-1, 0, 1])
def test_a_pool_without_usable_pages_is_a_setting_gone_wrong(pages: int) -> None:
    with pytest.raises(ConfigError) as caught:
        BlockPool(pages)
    assert caught.value.field == "kv_memory"


def test_a_page_is_free_when_its_last_owner_lets_go() -> None:
    pool = BlockPool(3)
    (page,) = pool.allocate(1)
    pool.share([page])
    pool.release([page])
    assert (pool.references(page), pool.free_pages) == (1, 1)
    pool.release([page])
    assert (pool.references(page), pool.free_pages) == (0, 2)


def test_misuse_is_refused() -> None:
    pool = BlockPool(4)
    (page,) = pool.allocate(1)
    other = 1 if page != 1 else 2
    for wrong in (
        lambda: pool.release([other]),
        lambda: pool.share([other]),
        lambda: pool.register(other, digest(1)),
        lambda: pool.hold("ticket", [page, other]),
    ):
        with pytest.raises(TwostrokeError):
            wrong()
    assert (pool.references(page), pool.held_pages, pool.free_pages) == (1, 0, 2)


def test_registered_pages_stay_findable_until_evicted() -> None:
    pool = BlockPool(4)
    pages = pool.allocate(3)
    chain = [digest(n) for n in range(3)]
    assert all(pool.register(page, key) for page, key in zip(pages, chain, strict=True))
    pool.release(pages)
    assert (pool.free_pages, pool.cached) == (3, 3)
    assert pool.prefix.match(chain) == pages
    assert pool.allocate(1) == [pages[2]], "the deepest page goes first"
    assert pool.prefix.match(chain) == pages[:2]
    pool.share(pages[:2])
    assert (pool.free_pages, pool.cached) == (0, 0)
    assert pool.prefix.match(chain) == pages[:2], "owned and findable"


def test_evicts_the_least_recently_used_chain_and_only_after_free_pages() -> None:
    pool = BlockPool(6)
    first, second = pool.allocate(2), pool.allocate(2)
    for number, page in enumerate([*first, *second]):
        pool.register(page, digest(number))
    pool.release(first)
    pool.release(second)
    pool.share(first)  # used again: now younger than the second
    pool.release(first)
    fresh = pool.allocate(1)
    assert fresh[0] not in (*first, *second)
    assert [pool.allocate(1) for _ in range(4)] == [[second[1]], [second[0]], [first[1]], [first[0]]]
    assert len(pool.prefix) == 0


def cached_in_turn(order: list[int]) -> BlockPool:
    """A pool whose pages are all cached, used last in this order."""
    pool = BlockPool(len(order) + 1)
    for page in pool.allocate(len(order)):
        pool.register(page, digest(page))
    for page in order:
        pool.release([page])
    return pool


def test_an_old_neighbour_below_is_evicted_with_a_page_and_a_young_one_is_not() -> None:
    pool = cached_in_turn(
        [20, 30, 19, 10, 18, *(page for page in range(1, 41) if page not in (20, 30, 19, 10, 18, 9)), 9]
    )
    assert pool.allocate(3) == [18, 19, 20], "30 and 10 were used before 18"
    assert pool.allocate(1) == [30]
    assert pool.allocate(2) == [1, 10], "9 was used last"
    assert pool.is_evictable(9)


def test_a_pool_full_of_cached_pages_does_not_fall_apart() -> None:
    draw, pool, live, pieces, taken = random.Random(7), BlockPool(1025), list[list[int]](), 0, 0
    for turn in range(2000):
        pages = pool.allocate(draw.randrange(8, 48))
        pieces += sum(after != before + 1 for before, after in pairwise([-1, *pages]))
        taken += len(pages)
        for page in pages:
            pool.register(page, b"%d-%d" % (turn, page))
        live.append(pages)
        if len(live) > 10:
            pool.release(live.pop(draw.randrange(10)))
    assert taken / pieces > 4, "pages a piece; 1.6 where only the oldest goes"


def test_pages_taken_at_once_come_in_rising_order_whatever_freed_them() -> None:
    pool = BlockPool(12)
    pages = pool.allocate(11)
    for number, page in enumerate(pages[:4]):
        pool.register(page, digest(number))
    for page in (7, 3, 9, 1, 11, 4, 2):
        pool.release([page])
    assert pool.allocate(7) == [1, 2, 3, 4, 7, 9, 11]


def test_same_content_twice_keeps_the_first_page() -> None:
    pool = BlockPool(4)
    first, second = pool.allocate(2)
    assert pool.register(first, digest(1))
    assert pool.register(first, digest(1)), "again is fine"
    assert not pool.register(second, digest(1))
    pool.release([second, first])
    assert (pool.cached, pool.free_pages) == (1, 3)
    with pytest.raises(TwostrokeError, match="other content"):
        pool.prefix.add(first, digest(2))


def test_a_hold_outlives_the_owner() -> None:
    pool = BlockPool(5)
    pages = pool.allocate(3)
    pool.hold(("writer", 1), pages[:2])
    assert (pool.held_pages, pool.quarantined) == (2, 0)
    pool.release(pages)
    assert (pool.free_pages, pool.held_pages, pool.quarantined) == (2, 2, 2)
    assert set(pool.allocate(2)).isdisjoint(pages[:2])
    assert pool.unhold(("writer", 1))
    assert (pool.free_pages, pool.held_pages, pool.quarantined) == (2, 0, 0)
    assert not pool.unhold(("writer", 1)), "a second time changes nothing"
    assert pool.free_pages == 2


def test_holds_are_counted_each_by_its_name() -> None:
    pool = BlockPool(4)
    (page,) = pool.allocate(1)
    pool.hold("a", [page])
    pool.hold("b", [page])
    pool.hold("none", [])
    with pytest.raises(TwostrokeError, match="exists"):
        pool.hold("a", [])
    pool.release([page])
    pool.unhold("a")
    assert (pool.held_pages, pool.quarantined, pool.references(page)) == (1, 1, 1)
    pool.unhold("b")
    assert pool.free_pages == 3
    assert pool.holds() == {"none": ()}


def test_a_held_page_that_was_registered_is_cached_after_its_ticket() -> None:
    pool = BlockPool(3)
    (page,) = pool.allocate(1)
    pool.hold("ticket", [page])
    pool.register(page, digest(1))
    pool.release([page])
    assert (pool.cached, pool.quarantined) == (0, 1)
    pool.unhold("ticket")
    assert (pool.cached, pool.quarantined) == (1, 0)
    assert pool.is_evictable(page)


def test_a_page_given_up_under_way_is_free_when_the_step_is_completed() -> None:
    pool = BlockPool(4)
    first, second, third = pool.allocate(3)
    pool.register(third, digest(1))
    pool.launched()
    pool.release([first])
    pool.launched()
    pool.release([second, third])
    assert (pool.free_pages, pool.retiring, pool.cached) == (1, 2, 1)  # what is whole is not written any more
    pool.completed()
    assert (pool.free_pages, pool.retiring) == (2, 1)
    assert pool.allocate(1) == [first]
    pool.completed()
    assert (pool.free_pages, pool.retiring) == (2, 0)
    with pytest.raises(TwostrokeError, match="on its way"):
        pool.completed()


def test_a_ticket_that_ends_under_way_leaves_its_pages_retiring() -> None:
    pool = BlockPool(3)
    pages = pool.allocate(2)
    pool.hold("ticket", pages)
    pool.release(pages)
    pool.launched()
    pool.unhold("ticket")
    assert (pool.free_pages, pool.retiring, pool.held_pages) == (0, 2, 0)
    pool.completed()
    assert pool.free_pages == 2
