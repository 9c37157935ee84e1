"""The device's state of each sequence: its block table and the token drawn last, a row a slot."""

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 128


@triton.jit(do_not_specialize=["count", "max_pages"])
def _set_table_kernel(
    tables,  # int32 [slots, max_pages]
    last_tokens,  # int64 [slots]
    updates,  # int32 [count, 3]
    count,
    max_pages,
    block: tl.constexpr,
):
    entry = tl.program_id(0) * block + tl.arange(0, block)
    inside = entry < count
    slot = tl.load(updates + entry * 3, mask=inside, other=0).to(tl.int64)
    index = tl.load(updates + entry * 3 + 1, mask=inside, other=0)
    value = tl.load(updates + entry * 3 + 2, mask=inside, other=0)
    tl.store(tables + slot * max_pages + index, value, mask=inside & (index >= 0))
    tl.store(last_tokens + slot, value.to(tl.int64), mask=inside & (index < 0))


@triton.jit(do_not_specialize=["rows", "most"], do_not_specialize_on_alignment=["slots"])
def _keep_tokens_kernel(
    last_tokens,  # int64 [slots]
    slots,  # int32 [rows]
    tokens,  # int64 [rows]
    told,  # int64 [turns, most]
    turn,  # int32 [1]
    rows,
    most,
    block: tl.constexpr,
):
    row = tl.program_id(0) * block + tl.arange(0, block)
    inside = row < rows
    slot = tl.load(slots + row, mask=inside, other=0)
    token = tl.load(tokens + row, mask=inside, other=0).to(tl.int64)
    tl.store(last_tokens + slot, token, mask=slot > 0)
    tl.store(told + tl.load(turn).to(tl.int64) * most + row, token, mask=inside)


def set_table(
    tables: Tensor,  # int32 [slots, max_pages] contiguous: written
    last_tokens: Tensor,  # int64 [slots]: written
    updates: Tensor,  # int32 [n, 3]: (slot, index, page), or (slot, -1, token)
) -> None:
    """tables[slot, index] = page; an entry of index -1 sets last_tokens[slot] instead.

    No place may occur twice, but for padding: entries (0, 0, 0), which leave the padding slot's table at page 0.
    """
    count = updates.shape[0]
    if count:
        grid = (triton.cdiv(count, _BLOCK),)
        _set_table_kernel[grid](tables, last_tokens, updates, count, tables.shape[1], _BLOCK, num_warps=4)


def keep_tokens(
    last_tokens: Tensor,  # int64 [slots]: written
    slots: Tensor,  # int32 [rows]: no slot twice, but for padding
    tokens: Tensor,  # int64 [rows]: drawn
    told: Tensor,  # int64 [turns, most]: written; may be the host's memory, pinned
    turn: Tensor,  # int32 [1]
) -> None:
    """last_tokens[slots[r]] = tokens[r], less rows of slot 0, the padding slot; told[turn, r] = tokens[r]."""
    rows = slots.shape[0]
    if rows:
        grid = (triton.cdiv(rows, _BLOCK),)
        most = told.shape[1]
        _keep_tokens_kernel[grid](last_tokens, slots, tokens, told, turn, rows, most, _BLOCK, num_warps=4)
