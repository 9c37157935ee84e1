"""How a decode step's attention is cut into work items, decided on the device from the rows' lengths.

Rows differ in length by orders of magnitude, and a captured graph knows none of them: a kernel of the graph reads the
positions and cuts every row into pieces of about equal size, so that all multiprocessors end at about the same time.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

MANY_ROWS = 48
RECORD = 8  # int32 words of an item: row, slot, first page, pages, row's length, row's first item, row's items, 0


@triton.jit
def _cut(length, slot, each, page_size: tl.constexpr, window: tl.constexpr):
    """(first page read, pages, items) of rows of `length` tokens; a padding row has one empty item."""
    first = tl.maximum(length - window, 0) // page_size if window else length * 0
    pages = tl.where(slot != 0, (length + page_size - 1) // page_size - first, 0)
    return first, pages, tl.maximum((pages + each - 1) // each, 1)


@triton.jit(do_not_specialize=["rows", "target"], do_not_specialize_on_alignment=["slots", "positions"])
def _plan_kernel(
    slots,
    positions,
    items,
    spans,
    rows,
    target,
    page_size: tl.constexpr,
    window: tl.constexpr,
    rows_block: tl.constexpr,
    items_block: tl.constexpr,
):
    row = tl.arange(0, rows_block)
    real = row < rows
    slot = tl.load(slots + row, mask=real, other=0)
    length = tl.load(positions + row, mask=real, other=0) + 1
    _, pages, _ = _cut(length, slot, 1, page_size, window)
    each = tl.maximum((tl.sum(pages, 0) + target - 1) // target, 1)
    _, pages, count = _cut(length, slot, each, page_size, window)
    count = tl.where(real, count, 0)
    ends = tl.cumsum(count, 0)
    if tl.program_id(0) == 0:
        tl.store(spans + 2 * row, ends - count, mask=real)
        tl.store(spans + 2 * row + 1, count, mask=real)

    item = tl.program_id(0) * items_block + tl.arange(0, items_block)
    before = ends[:, None] <= item[None, :]  # rows whose items all come before this one
    owner = tl.sum(before.to(tl.int32), 0)
    start = tl.max(tl.where(before, ends[:, None], 0), 0)
    used = owner < rows
    slot = tl.load(slots + owner, mask=used, other=0)
    length = tl.load(positions + owner, mask=used, other=0) + 1
    first, pages, count = _cut(length, slot, each, page_size, window)
    part = item - start
    begin, end = part * pages // count, (part + 1) * pages // count
    record = items + item * 8
    tl.store(record, tl.where(used, owner, -1))
    tl.store(record + 1, slot)
    tl.store(record + 2, first + begin)
    tl.store(record + 3, tl.where(used, end - begin, 0))
    tl.store(record + 4, length)
    tl.store(record + 5, start)
    tl.store(record + 6, tl.where(used, count, 0))
    tl.store(record + 7, 0)


class DecodePlan:
    """The work items of one step, on the device; made once, filled anew each step and per distinct window."""

    def __init__(self, max_rows: int, *, target_items: int, device: torch.device) -> None:
        """For steps of up to `max_rows` rows, cut into about `target_items` items in all.

        Raises ValueError where a number is not positive.
        """
        if max_rows < 1 or target_items < 1:
            raise ValueError(f"a plan needs rows and items, not {max_rows} and {target_items}")
        self.max_rows = max_rows
        self.target_items = target_items
        self.rows_block = triton.next_power_of_2(max(max_rows, 16))
        self.items_block = min(16, max(1, 8192 // self.rows_block))  # the kernel compares every row with every item
        padded = -(-self.max_items // self.items_block) * self.items_block
        self.items = torch.zeros(padded, RECORD, dtype=torch.int32, device=device)
        self.spans = torch.zeros(max_rows, 2, dtype=torch.int32, device=device)  # a row's first item, its items

    @property
    def max_items(self) -> int:
        """The most items that a step can have."""
        return self.items_of(self.max_rows)

    def items_of(self, rows: int) -> int:
        """The most items that a step of `rows` rows can have: as many programs are launched, whatever the lengths."""
        return rows + self.target_items


class DecodeLaunch(NamedTuple):
    """How the decode attention kernel is launched."""

    block: int  # positions a loop turn
    warps: int
    stages: int  # loop turns in flight
    fused: bool  # a row's last program merges its partial results; else a second kernel does


def decode_target_items(kv_heads: int, multiprocessors: int) -> int:
    """Items that fill the device: an item is a program a KV head, a multiprocessor holds two at once, twice over."""
    return max(1, 4 * multiprocessors // kv_heads)


def decode_launch(head_dim: int, itemsize: int, rows: int) -> DecodeLaunch:
    """A launch for this head: K and V of a loop turn fill about 32 KiB of shared memory (64 bf16 positions of 128).

    From MANY_ROWS on, rows are hardly split: more programs at once are worth more than deeper pipelines (measured on
    an H200: 69 us against 79 at 64 x 1k, but 304 against 250 at 32 x 8k).
    """
    width = triton.next_power_of_2(head_dim) * itemsize * 2
    block = min(128, max(16, 32768 // width))
    if rows >= MANY_ROWS or block * width > 65536:
        return DecodeLaunch(block=block, warps=4, stages=2, fused=rows >= MANY_ROWS)
    return DecodeLaunch(block=block, warps=4, stages=3, fused=False)


def plan_decode(plan: DecodePlan, slots: Tensor, positions: Tensor, *, page_size: int, window: int) -> None:
    """Fills `plan` for one step: row r reads positions 0..positions[r], or the last `window` of them (0: no window).

    `slots`, `positions`: int32 [rows], contiguous, on the device. Rows of slot 0 are padding and get an empty item.
    Raises ValueError for more rows than the plan has.
    """
    rows = slots.shape[0]
    if not 0 < rows <= plan.max_rows:
        raise ValueError(f"{rows} rows in a plan of {plan.max_rows}")
    _plan_kernel[(triton.cdiv(plan.items_of(rows), plan.items_block),)](
        slots,
        positions,
        plan.items,
        plan.spans,
        rows,
        plan.target_items,
        page_size=page_size,
        window=window,
        rows_block=plan.rows_block,
        items_block=plan.items_block,
        num_warps=8,
    )
