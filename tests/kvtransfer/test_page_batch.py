"""Pages as batches of copies: what is merged, where pointers lead, when arrays are made anew."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from twostroke.kvtransfer.messages import Copy
from twostroke.kvtransfer.page_batch import Addresses, LayersAt, PageBatch, PageBatches, merge

PAGE = 4096


def copy(src: tuple[int, ...], dst: tuple[int, ...], *, layer: int = 0, ticket: int = 1, ordinal: int = 0) -> Copy:
    return Copy(1, 9, ticket, layer, ordinal, src, dst)


def read(address: int, count: int) -> list[int]:
    """What a driver would read there."""
    import ctypes

    return list((ctypes.c_uint64 * count).from_address(address))


def test_neighbours_on_both_sides_become_one() -> None:
    src, dst, counts = merge((5, 6, 7, 9, 10, 3), (1, 2, 4, 5, 6, 7))
    assert (src.tolist(), dst.tolist(), counts.tolist()) == ([5, 7, 9, 3], [1, 4, 5, 7], [2, 1, 2, 1])


def test_a_falling_order_is_not_merged() -> None:
    assert merge((3, 2, 1), (3, 2, 1))[2].tolist() == [1, 1, 1]


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 30)), max_size=40))
def test_what_is_merged_is_what_was_asked_for(pairs: list[tuple[int, int]]) -> None:
    src, dst, counts = merge([pair[0] for pair in pairs], [pair[1] for pair in pairs])
    spread = [(int(s) + i, int(d) + i) for s, d, n in zip(src, dst, counts, strict=True) for i in range(int(n))]
    assert spread == pairs
    ends = list(zip(src + counts, dst + counts, strict=True))
    begins = list(zip(src, dst, strict=True))[1:]
    assert all(end != begin for end, begin in zip(ends, begins, strict=False))  # nothing is left to merge


def test_pointers_of_each_layer() -> None:
    batch, addresses = PageBatch((4, 5, 9), (2, 3, 1), PAGE), Addresses()
    for source, target in ((1 << 40, 1 << 50), ((1 << 40) + 77 * PAGE, 3 << 50)):  # beyond 32 bits, and 53
        layers = LayersAt(source, 100 * PAGE), LayersAt(target, 200 * PAGE)
        targets, sources, sizes = addresses.of(batch, 3, *layers)
        assert read(targets, 6) == [target + (200 * n + page) * PAGE for n in range(3) for page in (2, 1)]
        assert read(sources, 6) == [source + (100 * n + page) * PAGE for n in range(3) for page in (4, 9)]
        assert read(sizes, 6) == [2 * PAGE, PAGE] * 3


def test_a_larger_batch_gets_larger_arrays() -> None:
    addresses = Addresses()
    addresses.of(PageBatch((1,), (1,), PAGE), 1, LayersAt(0, PAGE), LayersAt(0, PAGE))
    pages = tuple(range(1, 999, 2))
    targets, sources, sizes = addresses.of(PageBatch(pages, pages, PAGE), 1, LayersAt(8, PAGE), LayersAt(16, PAGE))
    assert read(sizes, len(pages)) == [PAGE] * len(pages)
    assert read(targets, len(pages)) == [16 + PAGE * page for page in pages]
    assert read(sources, len(pages)) == [8 + PAGE * page for page in pages]


def test_arrays_are_made_once_for_all_layers_of_a_stretch() -> None:
    batches = PageBatches(32, 100, 200, PAGE)
    first = batches.of(copy((1, 2), (101, 102)))
    assert all(batches.of(copy((1, 2), (101, 102), layer=layer)) is first for layer in range(32))
    assert batches.of(copy((1, 2), (101, 102), ordinal=2)) is not first
    assert batches.of(copy((1, 3), (101, 102))) is not first  # the prompt's pages moved
    assert batches.of(copy((1, 2), (101, 103))).dst == (101, 103)
    assert np.array_equal(first.sources, [PAGE])


def test_few_are_remembered() -> None:
    batches = PageBatches(1, 10, 10, PAGE)
    for ticket in range(1, 1000):
        batches.of(copy((1,), (2,), ticket=ticket))
    assert len(batches._made) <= 64


@pytest.mark.parametrize(
    "bad",
    [
        copy((1,), (0,)),  # the peer's sink
        copy((1,), (200,)),
        copy((100,), (1,)),
        copy((-1,), (1,)),
        copy((1, 2), (1,)),
        copy((1,), (1,), layer=32),
        copy((1,), (1,), layer=-1),
    ],
)
def test_what_lies_outside_is_refused(bad: Copy) -> None:
    batches = PageBatches(32, 100, 200, PAGE)
    batches.of(copy((1,), (1,)))
    with pytest.raises(ValueError, match=r"page|layer"):
        batches.of(bad)
