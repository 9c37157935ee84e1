"""Pages as batches of copies: what is merged, where boxes lie, when they are made anew."""

import ctypes
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from twostroke.kvtransfer.cuda_runtime import COPY_BOX
from twostroke.kvtransfer.messages import Copy
from twostroke.kvtransfer.page_batch import LayersAt, PageBatch, PageBatches, merge

PAGE = 4096


def copy(src: tuple[int, ...], dst: tuple[int, ...], *, layer: int = 0, ticket: int = 1, ordinal: int = 0) -> Copy:
    return Copy(1, 9, ticket, layer, ordinal, src, dst)


def read(address: int, count: int) -> Any:
    """What a driver would read there."""
    return np.frombuffer((ctypes.c_byte * (COPY_BOX.itemsize * count)).from_address(address), COPY_BOX)


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


def test_boxes_of_a_stretch_of_layers() -> None:
    batch = PageBatch((4, 5, 9), (2, 3, 1), PAGE)
    for source, target in ((1 << 40, 1 << 50), ((1 << 40) + 77 * PAGE, 3 << 50)):  # beyond 32 bits, and 53
        address = batch.place(3, LayersAt(source, 100), LayersAt(target, 200))
        for box, (src, dst, rows) in zip(read(address, len(batch)), ((4, 2, 2), (9, 1, 1)), strict=True):
            assert box["source_address"] == source + src * PAGE
            assert box["target_address"] == target + dst * PAGE
            assert (box["width"], box["rows"], box["layers"]) == (PAGE, rows, 3)
            assert box["source_row_bytes"] * box["source_layer_rows"] == 100 * PAGE
            assert box["target_row_bytes"] * box["target_layer_rows"] == 200 * PAGE


def test_what_the_driver_is_told_apart_from_places() -> None:
    """The layout of CUDA_MEMCPY3D_BATCH_OP, by the words of it."""
    batch = PageBatch((1,), (2,), PAGE)
    address = batch.place(5, LayersAt(1 << 40, 7), LayersAt(1 << 41, 8))
    words = list((ctypes.c_uint64 * 14).from_address(address))
    pointer, order, overlap = 1, 1, 1 << 32
    source = [pointer, (1 << 40) + PAGE, PAGE, 7, 0]
    target = [pointer, (1 << 41) + 2 * PAGE, PAGE, 8, 0]
    assert words == [*source, *target, PAGE, 1, 5, order | overlap]


def test_arrays_are_made_once_for_all_layers_of_a_stretch() -> None:
    batches = PageBatches(32, 100, 200, PAGE)
    first = batches.of(copy((1, 2), (101, 102)))
    assert all(batches.of(copy((1, 2), (101, 102), layer=layer)) is first for layer in range(32))
    assert batches.of(copy((1, 2), (101, 102), ordinal=2)) is not first
    assert batches.of(copy((1, 3), (101, 102))) is not first  # the prompt's pages moved
    assert batches.of(copy((1, 2), (101, 103))).dst == (101, 103)


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
