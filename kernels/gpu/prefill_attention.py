"""Causal attention of prompt chunks over a paged KV pool (FlashAttention-2, Dao 2023: online softmax, one pass).

A program takes a tile: some query tokens of one sequence, for all query heads of one KV head, which share its K and V.
It reads keys in blocks in order of position. Blocks lie on a grid that starts at position 0, a block that a row sees
nothing of changes no bit of its result, and every block is computed by the same operations, masked or not. So a row's
result depends neither on how its prompt was cut into chunks nor on what else is in the call.
"""

import math
from collections.abc import Sequence
from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from .prefill_shape import PrefillShape, prefill_shape

LOG2E = tl.constexpr(math.log2(math.e))
MAX_ROW = 2**31  # of a pool seen as rows: the bulk copy's coordinates are int32


@triton.jit
def _offsets(
    table,
    page,  # that of the first key
    begin,  # position of the first key, a multiple of block
    end,  # pages from there on are not in the table
    masked: tl.constexpr,
    block: tl.constexpr,
    page_size: tl.constexpr,
    page_stride: tl.constexpr,
    head_dim: tl.constexpr,
):
    """Where a block's keys lie from the head's slab in page 0 on: int64 [block].

    A page is one number for all its keys: a few scalar loads, and no gather from the table.
    """
    lanes = tl.arange(0, block)
    if block <= page_size:
        return page.to(tl.int64) * page_stride + (begin % page_size + lanes) * head_dim
    offsets = (lanes % page_size).to(tl.int64) * head_dim
    offsets += tl.where(lanes < page_size, page.to(tl.int64) * page_stride, 0)
    for i in tl.static_range(1, block // page_size):
        index = begin // page_size + i
        more = tl.load(table + index, mask=index * page_size < end, other=0) if masked else tl.load(table + index)
        offsets += tl.where(lanes // page_size == i, more.to(tl.int64) * page_stride, 0)
    return offsets


@triton.jit
def _attend(
    acc,  # float32 [row_count, width]
    total,  # float32 [row_count]: sums of the weights
    top,  # float32 [row_count]: greatest score so far, times log2(e)
    q,  # [row_count, width]
    positions,  # int32 [row_count]
    pool,  # pointer to the KV head's K in page 0
    slabs,  # descriptor of the pool as [pages * 2 * kv_heads * page_size, head_dim], or the pool itself where not used
    kv_head,
    table,
    low,  # first position that a row of the tile sees
    end,  # after the last one
    first,  # of the keys, a multiple of block
    last,
    masked: tl.constexpr,
    block: tl.constexpr,
    head_dim: tl.constexpr,
    width: tl.constexpr,
    kv_heads: tl.constexpr,
    page_size: tl.constexpr,
    factor: tl.constexpr,
    cap: tl.constexpr,
    window: tl.constexpr,
    bulk: tl.constexpr,
    stages: tl.constexpr,
):
    """Folds the keys first .. last - 1 in. Unless masked, every row sees all of them."""
    slab: tl.constexpr = page_size * head_dim
    dims = tl.arange(0, width)
    page = tl.load(table + first // page_size, mask=first < last, other=0)
    for begin in tl.range(first, last, block, num_stages=stages):
        keys = begin + tl.arange(0, block)
        if bulk and not masked:
            row = (page * (2 * kv_heads) + kv_head) * page_size + begin % page_size
            k = slabs.load([row, 0])
            v = slabs.load([row + kv_heads * page_size, 0])
        else:
            offsets = _offsets(table, page, begin, end, masked, block, page_size, 2 * kv_heads * slab, head_dim)
            elements = pool + offsets[:, None] + dims[None, :]
            if masked:  # what no row sees may be NaN, and 0 * NaN is NaN
                there = ((keys >= low) & (keys < end))[:, None] & (dims[None, :] < head_dim)
                k = tl.load(elements, mask=there, other=0.0)
                v = tl.load(elements + kv_heads * slab, mask=there, other=0.0)
            elif width > head_dim:
                k = tl.load(elements, mask=dims[None, :] < head_dim, other=0.0)
                v = tl.load(elements + kv_heads * slab, mask=dims[None, :] < head_dim, other=0.0)
            else:
                k = tl.load(elements)
                v = tl.load(elements + kv_heads * slab)
        # Known a turn ahead: the copies of the next keys need not wait for it.
        page = tl.load(table + tl.minimum(begin + block, last - 1) // page_size)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if cap > 0:  # tanh(scores * scale / cap); cap itself is in the sharpness
            scores = 1.0 - 2.0 / (tl.exp2(scores * (factor * 2.0 / cap)) + 1.0)
        if masked:
            seen = keys[None, :] <= positions[:, None]
            if window > 0:
                seen = seen & (keys[None, :] > positions[:, None] - window)
            scores = tl.where(seen, scores, float("-inf"))
        sharpness: tl.constexpr = cap * LOG2E if cap > 0 else factor
        new_top = tl.maximum(top, tl.max(scores, 1) * sharpness)
        base = new_top
        if masked and window > 0:  # nothing seen yet: avoid inf - inf
            base = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp2(scores * sharpness - base[:, None])
        decay = tl.exp2(top - base)
        total = total * decay + tl.sum(weights, 1)
        acc = tl.dot(weights.to(v.dtype), v, acc * decay[:, None], input_precision="ieee")
        top = new_top
    return acc, total, top


@triton.jit(do_not_specialize_on_alignment=["tiles"])
def _prefill_kernel(
    q,
    pool,
    slabs,
    tables,
    tiles,
    out,
    q_stride,
    out_stride,
    table_stride,
    group: tl.constexpr,
    pack: tl.constexpr,
    row_count: tl.constexpr,
    block: tl.constexpr,
    head_dim: tl.constexpr,
    width: tl.constexpr,
    kv_heads: tl.constexpr,
    page_size: tl.constexpr,
    factor: tl.constexpr,
    cap: tl.constexpr,
    window: tl.constexpr,
    bulk: tl.constexpr,
    stages: tl.constexpr,
    held: tl.constexpr,
):
    """Program (head block, tile): row r is query head r % pack of the block at token r // pack of the tile."""
    tile = tiles + tl.program_id(1) * 4
    slot, first_token = tl.load(tile), tl.load(tile + 1)
    count, start = tl.load(tile + 2), tl.load(tile + 3)
    if count == 0:
        return
    first_head = tl.program_id(0) * pack
    kv_head = first_head // group
    rows = tl.arange(0, row_count)
    token = rows // pack
    dims = tl.arange(0, width)
    real = ((token < count) & (rows < row_count // pack * pack))[:, None] & (dims[None, :] < head_dim)
    inner = (first_head + rows % pack)[:, None] * head_dim + dims[None, :]
    at = (first_token + token).to(tl.int64)[:, None]
    queries = tl.load(q + at * q_stride + inner, mask=real, other=0.0)
    if held:  # a computed operand stays in registers: shared memory then feeds the matrix units K alone
        queries = queries * 0.5
    positions = start + tl.minimum(token, count - 1)

    table = tables + slot.to(tl.int64) * table_stride
    keys_of_head = pool + kv_head.to(tl.int64) * (page_size * head_dim)
    end = start + count
    full_to = (start + 1) // block * block  # blocks below it hide nothing from the first row
    low, full_from, first = 0, 0, 0
    if window > 0:
        low = tl.maximum(start + 1 - window, 0)
        first = low // block * block
        full_from = tl.minimum(tl.cdiv(tl.maximum(end - window, 0), block) * block, full_to)
    acc = tl.zeros([row_count, width], tl.float32)
    total = tl.zeros([row_count], tl.float32)
    top = tl.full([row_count], float("-inf"), tl.float32)
    if window > 0:
        acc, total, top = _attend(
            acc, total, top, queries, positions, keys_of_head, slabs, kv_head, table, low, end, first, full_from,
            True, block, head_dim, width, kv_heads, page_size, factor, cap, window, bulk, stages,
        )  # fmt: skip
    acc, total, top = _attend(
        acc, total, top, queries, positions, keys_of_head, slabs, kv_head, table, low, end, full_from, full_to,
        False, block, head_dim, width, kv_heads, page_size, factor, cap, window, bulk, stages,
    )  # fmt: skip
    acc, total, top = _attend(
        acc, total, top, queries, positions, keys_of_head, slabs, kv_head, table, low, end, full_to, end,
        True, block, head_dim, width, kv_heads, page_size, factor, cap, window, bulk, stages,
    )  # fmt: skip
    tl.store(out + at * out_stride + inner, (acc / total[:, None]).to(out.dtype.element_ty), mask=real)


def prefill_tiles(spans: Sequence[tuple[int, int, int, int]], block: int) -> list[tuple[int, int, int, int]]:
    """Cuts spans (slot, first token, tokens, position of the first) into tiles of at most `block` tokens, same fields.

    Those with the most keys come first: the last to start should be short.
    """
    tiles = [
        (slot, first + i, min(block, count - i), start + i)
        for slot, first, count, start in spans
        for i in range(0, count, block)
    ]
    return sorted(tiles, key=lambda tile: -(tile[2] + tile[3]))


def prefill_attention(
    q: Tensor,
    pool: Tensor,
    tables: Tensor,
    tiles: Tensor,
    out: Tensor,
    *,
    heads: int,
    kv_heads: int,
    page_size: int,
    scale: float,
    cap: float = 0.0,
    window: int = 0,
    shape: PrefillShape | None = None,
) -> None:
    """Attention of chunks of prompts to all that comes before in their sequences, themselves included.

    `q`, `out`: [tokens, heads * head_dim], rows may be strided; `pool`: [pages, 2, kv_heads, page_size, head_dim],
    contiguous, this step's K and V written; `tables`: int32 [slots, max_pages]; `tiles`: int32 [tiles, 4], from
    `prefill_tiles` for blocks of `prefill_shape(...).tokens`; those of no tokens are skipped. Query head h reads KV
    head h // (heads / kv_heads). Scores are `scale` times products, then cap * tanh(score / cap) if there is a `cap`;
    with a `window` a token sees so many tokens, itself counted in. Rows of `out` in no tile are left as they are.
    """
    if tiles.shape[0] == 0:
        return
    head_dim = pool.shape[-1]
    shape = shape or prefill_shape(heads, kv_heads, head_dim, page_size, pool.dtype)
    if shape.hopper:
        from .hopper_attention import hopper_attention  # Gluon, which other GPUs need not know

        hopper_attention(
            q,
            pool,
            tables,
            tiles,
            out,
            kv_heads=kv_heads,
            page_size=page_size,
            scale=scale,
            cap=cap,
            window=window,
            heads=heads,
            shape=shape,
        )
        return
    width = max(16, triton.next_power_of_2(head_dim))
    slabs: Any = pool
    if shape.bulk:
        flat = pool.view(-1, head_dim)
        if shape.keys > page_size or flat.shape[0] > MAX_ROW:
            raise ValueError(f"blocks of {shape.keys} keys cannot be copied from pages of {page_size}")
        slabs = TensorDescriptor.from_tensor(flat, [shape.keys, width])
    _prefill_kernel[(heads // shape.pack, tiles.shape[0])](
        q,
        pool,
        slabs,
        tables,
        tiles,
        out,
        q.stride(0),
        out.stride(0),
        tables.stride(0),
        group=heads // kv_heads,
        pack=shape.pack,
        row_count=shape.rows,
        block=shape.keys,
        head_dim=head_dim,
        width=width,
        kv_heads=kv_heads,
        page_size=page_size,
        factor=scale * LOG2E.value * (2.0 if shape.held else 1.0),
        cap=cap,
        window=window,
        bulk=shape.bulk,
        stages=shape.stages,
        held=shape.held,
        num_warps=shape.warps,
    )
