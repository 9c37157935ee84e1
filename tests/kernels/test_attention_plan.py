import pytest
import torch

from twostroke.kernels import attention_plan
from twostroke.kernels.attention_plan import PoolShape, Span, plan_attention

SHAPE = PoolShape(kv_heads=2, page_size=16, head_dim=64)


def singles(*starts: int) -> list[Span]:
    return [Span(i, 1, start, [7 + i] * (start // 16 + 1)) for i, start in enumerate(starts)]


def sizes(spans: list[Span]) -> list[tuple[int, int]]:
    return [(group.first, group.count) for group in plan_attention(spans, SHAPE).groups]


def test_like_lengths_share_a_group():
    assert sizes(singles(500, 400, 300, 260)) == [(0, 4)]
    assert sizes(singles(500, 400, 100, 90, 3)) == [(0, 2), (2, 2), (4, 1)]
    assert sizes(singles(3, 500, 4)) == [(0, 1), (1, 1), (2, 1)]


def test_a_group_stays_within_its_bound(monkeypatch):
    monkeypatch.setattr(attention_plan, "GROUP_ELEMENTS", 3 * 100 * 2 * 64)
    assert sizes(singles(*[99] * 7)) == [(0, 3), (3, 3), (6, 1)]
    assert sizes(singles(5000, 4999)) == [(0, 1), (1, 1)]


def test_chunks_are_planned_alone_and_split_groups():
    spans = [Span(0, 1, 20, [1, 2]), Span(1, 4, 30, [3, 4, 5]), Span(5, 1, 20, [6, 7])]
    plan = plan_attention(spans, SHAPE)
    assert [(group.first, group.count, group.length) for group in plan.groups] == [(0, 1, 21), (5, 1, 21)]
    assert [(chunk.first, chunk.count, chunk.start) for chunk in plan.chunks] == [(1, 4, 30)]
    assert plan.chunks[0].slabs.tolist() == [page * 4 + half for half in range(4) for page in (3, 4, 5)]


def test_a_group_is_padded_with_the_sink_and_masked():
    plan = plan_attention([Span(0, 1, 17, [5, 6, 99]), Span(1, 1, 15, [8])], SHAPE)
    (group,) = plan.groups
    assert group.length == 32
    table = [[5, 6], [8, 0]]
    assert group.slabs.tolist() == [
        page * 4 + half * 2 + head for half in (0, 1) for row in table for head in (0, 1) for page in row
    ]
    lengths = [18, 18, 16, 16]
    assert group.mask is not None
    assert [int((row == 0).sum()) for row in group.mask[:, 0]] == lengths
    assert group.beyond is not None
    expected = [
        (half * 4 + i) * 32 + slot for half in (0, 1) for i, length in enumerate(lengths) for slot in range(length, 32)
    ]
    assert group.beyond.tolist() == expected
    assert group.slabs.dtype == torch.int64


def test_a_short_block_table_is_refused():
    with pytest.raises(ValueError, match="1 pages for 17 positions"):
        plan_attention([Span(0, 1, 16, [3])], SHAPE)


def test_a_window_leaves_out_the_pages_before_it():
    spans = [Span(0, 1, 70, [9, 8, 7, 6, 5]), Span(1, 10, 40, [1, 2, 3, 4]), Span(11, 1, 10, [20])]
    plan = plan_attention(spans, SHAPE, window=20)
    first, last = plan.groups
    # Position 70 sees 51 .. 70: slots 3 .. 22 of the pages from the fourth on.
    assert (first.low, first.length, first.slabs.tolist()[:2]) == (3, 23, [6 * 4, 5 * 4])
    assert (last.low, last.length) == (0, 11)
    # Position 40 sees 21 and more: in the second page.
    (chunk,) = plan.chunks
    assert (chunk.start, chunk.window, chunk.slabs.tolist()[:3]) == (24, 20, [2 * 4, 3 * 4, 4 * 4])
    assert plan_attention(spans, SHAPE, window=71).groups[0].low == 0


def test_a_window_is_masked_in_a_group():
    (group,) = plan_attention([Span(0, 1, 40, [1, 2, 3]), Span(1, 1, 37, [4, 5, 6])], SHAPE, window=10).groups
    assert group.length == 32  # both from their second page on
    assert group.mask is not None
    seen = [row.nonzero().flatten().tolist() for row in (group.mask[:, 0] == 0)]
    assert seen == [list(range(15, 25))] * 2 + [list(range(12, 22))] * 2
    assert group.beyond is not None
    assert group.beyond[:7].tolist() == list(range(25, 32))
