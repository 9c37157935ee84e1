"""What a step's attention reads and masks: index tensors built once a step and used by every layer."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# Most elements of K gathered at once for a group of decoding sequences: they should stay in the cache.
GROUP_ELEMENTS = 1 << 21


@dataclass(frozen=True, slots=True)
class Span:
    """A sequence's tokens in the step."""

    first: int  # index of its first token among the step's tokens
    count: int
    start: int  # position of that token; positions below it are in the pool
    pages: Sequence[int]  # block table; covers start + count positions


@dataclass(frozen=True, slots=True)
class PoolShape:
    """A layer's pool: [pages, 2, kv_heads, page_size, head_dim]."""

    kv_heads: int
    page_size: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Sequences with one token each, of similar length, padded to the longest."""

    first: int  # their tokens are first .. first + count - 1
    count: int
    length: int  # positions: of the one sequence, else padded to whole pages
    slabs: (
        Tensor  # int64 [2 * count * kv_heads * pages]: rows of the pool as [pages * 2 * kv_heads, page_size * head_dim]
    )
    beyond: Tensor | None  # int64: slots of no position, indices into [2 * count * kv_heads * length]; None: count is 1
    mask: Tensor | None  # float32 [count * kv_heads, 1, length]: -inf there, else 0


@dataclass(frozen=True, slots=True)
class Chunk:
    """Several tokens of one sequence."""

    first: int
    count: int
    start: int
    slabs: Tensor  # int64 [2 * kv_heads * pages]


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """All of a step."""

    shape: PoolShape
    groups: list[DecodeGroup]
    chunks: list[Chunk]


def plan_attention(spans: Sequence[Span], shape: PoolShape, device: torch.device | str = "cpu") -> AttentionPlan:
    """Groups the spans of one token and plans the others one by one.

    Spans of one token should come first and longest first: neighbours are grouped, and padding costs.
    """
    groups = [_group(members, shape, device) for members in _neighbours(spans, shape)]
    chunks = [
        Chunk(span.first, span.count, span.start, _slabs([_pages(span, shape)], shape, device))
        for span in spans
        if span.count > 1
    ]
    return AttentionPlan(shape, groups, chunks)


def _neighbours(spans: Sequence[Span], shape: PoolShape) -> Iterator[list[Span]]:
    """Runs of one-token spans whose padding at most doubles what is read, within GROUP_ELEMENTS."""
    members: list[Span] = []
    for span in spans:
        if span.count != 1:
            continue
        if members and not _fits(members, span, shape):
            yield members
            members = []
        members.append(span)
    if members:
        yield members


def _fits(members: list[Span], span: Span, shape: PoolShape) -> bool:
    lengths = [members[0].start + 1, members[-1].start + 1, span.start + 1]
    longest, shortest = max(lengths), min(lengths)
    elements = (len(members) + 1) * longest * shape.kv_heads * shape.head_dim
    adjacent = members[-1].first + 1 == span.first
    return adjacent and longest <= 2 * shortest + shape.page_size and elements <= GROUP_ELEMENTS


def _group(members: list[Span], shape: PoolShape, device: torch.device | str) -> DecodeGroup:
    first, count = members[0].first, len(members)
    slabs = _slabs([_pages(span, shape) for span in members], shape, device)
    if count == 1:
        return DecodeGroup(first, 1, members[0].start + 1, slabs, None, None)
    length = slabs.numel() // (2 * count * shape.kv_heads) * shape.page_size
    lengths = torch.tensor([span.start + 1 for span in members], device=device)
    beyond = torch.arange(length, device=device) >= lengths.repeat_interleave(shape.kv_heads).unsqueeze(1)
    mask = torch.zeros(beyond.shape, device=device).masked_fill_(beyond, float("-inf")).unsqueeze(1)
    return DecodeGroup(first, count, length, slabs, beyond.repeat(2, 1).view(-1).nonzero().view(-1), mask)


def _pages(span: Span, shape: PoolShape) -> list[int]:
    """The pages that hold the span's positions, and no page beyond."""
    needed = -(-(span.start + span.count) // shape.page_size)
    if len(span.pages) < needed:
        raise ValueError(f"a block table of {len(span.pages)} pages for {span.start + span.count} positions")
    return list(span.pages[:needed])


def _slabs(tables: list[list[int]], shape: PoolShape, device: torch.device | str) -> Tensor:
    """Slab numbers ordered K before V, sequence, head, page; shorter tables padded with page 0."""
    longest = max(map(len, tables))
    table = torch.tensor([pages + [0] * (longest - len(pages)) for pages in tables], device=device)
    halves = torch.arange(2 * shape.kv_heads, device=device).view(2, 1, shape.kv_heads, 1)
    return (table.view(1, len(tables), 1, longest) * (2 * shape.kv_heads) + halves).view(-1)
