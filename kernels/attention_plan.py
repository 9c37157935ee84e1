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
    length: int  # slots: up to the token of the one sequence, else padded to whole pages
    slabs: (
        Tensor  # int64 [2 * count * kv_heads * pages]: rows of the pool as [pages * 2 * kv_heads, page_size * head_dim]
    )
    beyond: Tensor | None  # int64: slots of no position, indices into [2 * count * kv_heads * length]; None: count is 1
    mask: Tensor | None  # float32 [count * kv_heads, 1, length]: -inf there and before the window, else 0
    low: int = 0  # of the one sequence: its first slot in the window


@dataclass(frozen=True, slots=True)
class Chunk:
    """Several tokens of one sequence."""

    first: int
    count: int
    start: int  # slot of the first one: its position, less those of the pages before its window
    slabs: Tensor  # int64 [2 * kv_heads * pages]
    window: int = 0  # a token sees so many, itself counted in; 0: all


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """All of a step."""

    shape: PoolShape
    groups: list[DecodeGroup]
    chunks: list[Chunk]


@dataclass(frozen=True, slots=True)
class _Reach:
    """What one span's attention reads: the pages from its first token's window on. Their positions are its slots."""

    span: Span
    pages: list[int]
    start: int  # slot of its first token
    low: int  # first slot that this token sees

    @property
    def length(self) -> int:
        return self.start + self.span.count


def plan_attention(
    spans: Sequence[Span], shape: PoolShape, device: torch.device | str = "cpu", window: int = 0
) -> AttentionPlan:
    """Groups the spans of one token and plans the others one by one.

    Spans of one token should come first and longest first: neighbours are grouped, and padding costs. `window`: a token
    sees so many tokens, itself counted in; 0: all before it. Pages out of every window are not read; they stay in the
    block table, which all layers share.
    """
    reaches = [_reach(span, shape, window) for span in spans]
    groups = [_group(members, shape, device) for members in _neighbours(reaches, shape)]
    chunks = [
        Chunk(reach.span.first, reach.span.count, reach.start, _slabs([reach.pages], shape, device), window)
        for reach in reaches
        if reach.span.count > 1
    ]
    return AttentionPlan(shape, groups, chunks)


def _reach(span: Span, shape: PoolShape, window: int) -> _Reach:
    needed = -(-(span.start + span.count) // shape.page_size)
    if len(span.pages) < needed:
        raise ValueError(f"a block table of {len(span.pages)} pages for {span.start + span.count} positions")
    low = max(0, span.start + 1 - window) if window else 0
    skipped = low // shape.page_size
    before = skipped * shape.page_size
    return _Reach(span, list(span.pages[skipped:needed]), span.start - before, low - before)


def _neighbours(reaches: Sequence[_Reach], shape: PoolShape) -> Iterator[list[_Reach]]:
    """Runs of one-token spans whose padding at most doubles what is read, within GROUP_ELEMENTS."""
    members: list[_Reach] = []
    for reach in reaches:
        if reach.span.count != 1:
            continue
        if members and not _fits(members, reach, shape):
            yield members
            members = []
        members.append(reach)
    if members:
        yield members


def _fits(members: list[_Reach], reach: _Reach, shape: PoolShape) -> bool:
    lengths = [members[0].length, members[-1].length, reach.length]
    longest, shortest = max(lengths), min(lengths)
    elements = (len(members) + 1) * longest * shape.kv_heads * shape.head_dim
    adjacent = members[-1].span.first + 1 == reach.span.first
    return adjacent and longest <= 2 * shortest + shape.page_size and elements <= GROUP_ELEMENTS


def _group(members: list[_Reach], shape: PoolShape, device: torch.device | str) -> DecodeGroup:
    first, count = members[0].span.first, len(members)
    slabs = _slabs([reach.pages for reach in members], shape, device)
    if count == 1:
        return DecodeGroup(first, 1, members[0].length, slabs, None, None, members[0].low)
    length = slabs.numel() // (2 * count * shape.kv_heads) * shape.page_size
    slots = torch.arange(length, device=device)
    beyond = slots >= _by_head([reach.length for reach in members], shape, device)
    hidden = beyond
    if any(reach.low for reach in members):
        hidden = beyond | (slots < _by_head([reach.low for reach in members], shape, device))
    mask = torch.zeros(beyond.shape, device=device).masked_fill_(hidden, float("-inf")).unsqueeze(1)
    return DecodeGroup(first, count, length, slabs, beyond.repeat(2, 1).view(-1).nonzero().view(-1), mask)


def _by_head(numbers: list[int], shape: PoolShape, device: torch.device | str) -> Tensor:
    """A sequence's number for each of its KV heads: int64 [sequences * kv_heads, 1]."""
    return torch.tensor(numbers, device=device).repeat_interleave(shape.kv_heads).unsqueeze(1)


def _slabs(tables: list[list[int]], shape: PoolShape, device: torch.device | str) -> Tensor:
    """Slab numbers ordered K before V, sequence, head, page; shorter tables padded with page 0."""
    longest = max(map(len, tables))
    table = torch.tensor([pages + [0] * (longest - len(pages)) for pages in tables], device=device)
    halves = torch.arange(2 * shape.kv_heads, device=device).view(2, 1, shape.kv_heads, 1)
    return (table.view(1, len(tables), 1, longest) * (2 * shape.kv_heads) + halves).view(-1)
