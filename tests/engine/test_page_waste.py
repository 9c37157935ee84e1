from dataclasses import dataclass

import pytest

from twostroke.engine.page_waste import HORIZON, LOOK_EVERY, PAGE_SIZES, PageUse, lost_share, suited_page_size


@dataclass
class Placed:
    pages: list[int]
    base: int
    computed: int


def look(use: PageUse, sequences: list[Placed], times: int = 1) -> None:
    for _ in range(times * LOOK_EVERY):
        use.look(sequences)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize(("first", "last"), [(1, 1), (16, 16), (1, 128), (17, 300), (1000, 1256)])
def test_the_share_lost_is_what_counting_gives(page_size, first, last):
    covered = empty = 0
    for length in range(first, last + 1):
        pages = -(-length // page_size)
        covered += pages * page_size
        empty += pages * page_size - length
    assert lost_share(page_size, first, last) == pytest.approx(empty / covered)


def test_half_a_page_is_lost_in_the_long_run():
    for page_size in PAGE_SIZES:
        assert lost_share(page_size, 1000, 4999) == pytest.approx(page_size / 2 / (3000 + page_size / 2), rel=0.07)


def test_longer_sequences_suit_larger_pages():
    assert suited_page_size(0) == 0
    assert suited_page_size(100) == 16
    assert suited_page_size(400) == 32
    assert suited_page_size(2048) == 64
    assert suited_page_size(100_000) == 128
    sizes = [suited_page_size(length) for length in range(1, 20_000, 7)]
    assert sizes == sorted(sizes)


def test_gauges():
    use = PageUse(16)
    assert (use.covered, use.unused, use.mean_length) == (0, 0, 0.0)
    # One that decodes, with a page set aside; one whose prompt of 40 tokens is partly computed.
    look(use, [Placed([1, 2, 3], base=10, computed=20), Placed([4, 5, 6], base=40, computed=16)])
    assert use.covered == 6 * 16
    assert use.unused == 96 - 20 - 40
    assert use.mean_length == 30
    look(use, [])
    assert (use.covered, use.unused, use.mean_length) == (0, 0, 30)


def test_it_looks_now_and_then():
    seen = []

    def sequences():
        seen.append(1)
        yield Placed([1], 3, 3)

    use = PageUse(16)
    for _ in range(10 * LOOK_EVERY):
        use.look(sequences())
    assert len(seen) == 10


def test_the_mean_follows_the_traffic():
    use = PageUse(16)
    look(use, [Placed([1], 10, 10)])
    look(use, [Placed([1, 2], 20, 20)])
    assert use.mean_length == 15
    look(use, [Placed([1] * 100, 1600, 1600)], 5 * HORIZON)
    assert use.mean_length == pytest.approx(1600, rel=0.02)
