"""Causal attention of prompt chunks over a paged KV pool (FlashAttention-2, Dao 2023: online softmax, one pass).

A program takes a tile: some query tokens of one sequence, for all query heads of one KV head, which share its K and V.
It reads keys in blocks in order of position. Blocks lie on a grid that starts at position 0, a block that a row sees
nothing of changes no bit of its result, and every block is computed by the same operations, masked or not. So a row's
result depends neither on how its prompt was cut into chunks nor on what else is in the call.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

LOG2E = tl.constexpr(math.log2(math.e))
MAX_PACK = 32  # query heads in a tile
MAX_ROW = 2**31  # of a pool seen as rows: the bulk copy's coordinates are int32


@triton.jit
def _attend(
    acc,  # float32 [ROWS, WIDTH]
    total,  # float32 [ROWS]: sums of the weights
    top,  # float32 [ROWS]: greatest score so far, times log2(e)
    q,  # [ROWS, WIDTH]
    positions,  # int32 [ROWS]
    pool,  # pointer to the KV head's K in page 0
    slabs,  # descriptor of the pool as [pages * 2 * KV_HEADS * PAGE, HEAD_DIM], or the pool itself where not used
    kv_head,
    table,
    low,  # first position that a row of the tile sees
    end,  # after the last one
    first,  # of the keys, a multiple of KEYS
    last,
    MASKED: tl.constexpr,
    KEYS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    KV_HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    FACTOR: tl.constexpr,
    CAP: tl.constexpr,
    WINDOW: tl.constexpr,
    BULK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Folds the keys first .. last - 1 in. Unless MASKED, every row sees all of them."""
    slab: tl.constexpr = PAGE * HEAD_DIM
    dims = tl.arange(0, WIDTH)
    lanes = tl.arange(0, KEYS)
    for block in tl.range(first, last, KEYS, num_stages=STAGES):
        keys = block + lanes
        if BULK and not MASKED:
            page = tl.load(table + block // PAGE)
            row = (page * (2 * KV_HEADS) + kv_head) * PAGE + block % PAGE
            k = slabs.load([row, 0])
            v = slabs.load([row + KV_HEADS * PAGE, 0])
        else:
            # A page is one number for all its keys: a few scalars, and no gather from the table.
            if KEYS <= PAGE:
                at = tl.load(table + block // PAGE).to(tl.int64) * (2 * KV_HEADS * slab) + (block % PAGE) * HEAD_DIM
                offsets = at + lanes.to(tl.int64) * HEAD_DIM
            else:
                offsets = (lanes % PAGE).to(tl.int64) * HEAD_DIM
                for i in tl.static_range(KEYS // PAGE):
                    index = block // PAGE + i
                    if MASKED:
                        page = tl.load(table + index, mask=index * PAGE < end, other=0)
                    else:
                        page = tl.load(table + index)
                    offsets += tl.where(lanes // PAGE == i, page.to(tl.int64) * (2 * KV_HEADS * slab), 0)
            elements = pool + offsets[:, None] + dims[None, :]
            if MASKED:  # what no row sees may be NaN, and 0 * NaN is NaN
                there = ((keys >= low) & (keys < end))[:, None] & (dims[None, :] < HEAD_DIM)
                k = tl.load(elements, mask=there, other=0.0)
                v = tl.load(elements + KV_HEADS * slab, mask=there, other=0.0)
            elif WIDTH > HEAD_DIM:
                k = tl.load(elements, mask=dims[None, :] < HEAD_DIM, other=0.0)
                v = tl.load(elements + KV_HEADS * slab, mask=dims[None, :] < HEAD_DIM, other=0.0)
            else:
                k = tl.load(elements)
                v = tl.load(elements + KV_HEADS * slab)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if CAP > 0:  # tanh(scores * scale / CAP); CAP itself is in the sharpness
            scores = 1.0 - 2.0 / (tl.exp2(scores * (FACTOR * 2.0 / CAP)) + 1.0)
        if MASKED:
            seen = keys[None, :] <= positions[:, None]
            if WINDOW > 0:
                seen = seen & (keys[None, :] > positions[:, None] - WINDOW)
            scores = tl.where(seen, scores, float("-inf"))
        sharpness: tl.constexpr = CAP * LOG2E if CAP > 0 else FACTOR
        new_top = tl.maximum(top, tl.max(scores, 1) * sharpness)
        base = new_top
        if MASKED and WINDOW > 0:  # nothing seen yet: avoid inf - inf
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
    GROUP: tl.constexpr,
    PACK: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    KV_HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    FACTOR: tl.constexpr,
    CAP: tl.constexpr,
    WINDOW: tl.constexpr,
    BULK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Program (head block, tile): row r is query head r % PACK of the block at token r // PACK of the tile."""
    tile = tiles + tl.program_id(1) * 4
    slot, first_token = tl.load(tile), tl.load(tile + 1)
    count, start = tl.load(tile + 2), tl.load(tile + 3)
    if count == 0:
        return
    first_head = tl.program_id(0) * PACK
    kv_head = first_head // GROUP
    rows = tl.arange(0, ROWS)
    token = rows // PACK
    dims = tl.arange(0, WIDTH)
    real = ((token < count) & (rows < ROWS // PACK * PACK))[:, None] & (dims[None, :] < HEAD_DIM)
    inner = (first_head + rows % PACK)[:, None] * HEAD_DIM + dims[None, :]
    at = (first_token + token).to(tl.int64)[:, None]
    queries = tl.load(q + at * q_stride + inner, mask=real, other=0.0)
    positions = start + tl.minimum(token, count - 1)

    table = tables + slot.to(tl.int64) * table_stride
    keys_of_head = pool + kv_head.to(tl.int64) * (PAGE * HEAD_DIM)
    end = start + count
    full_to = (start + 1) // KEYS * KEYS  # blocks below it hide nothing from the first row
    low, full_from, first = 0, 0, 0
    if WINDOW > 0:
        low = tl.maximum(start + 1 - WINDOW, 0)
        first = low // KEYS * KEYS
        full_from = tl.minimum(tl.cdiv(tl.maximum(end - WINDOW, 0), KEYS) * KEYS, full_to)
    acc = tl.zeros([ROWS, WIDTH], tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    if WINDOW > 0:
        acc, total, top = _attend(
            acc, total, top, queries, positions, keys_of_head, slabs, kv_head, table, low, end, first, full_from,
            True, KEYS, HEAD_DIM, WIDTH, KV_HEADS, PAGE, FACTOR, CAP, WINDOW, BULK, STAGES,
        )  # fmt: skip
    acc, total, top = _attend(
        acc, total, top, queries, positions, keys_of_head, slabs, kv_head, table, low, end, full_from, full_to,
        False, KEYS, HEAD_DIM, WIDTH, KV_HEADS, PAGE, FACTOR, CAP, WINDOW, BULK, STAGES,
    )  # fmt: skip
    acc, total, top = _attend(
        acc, total, top, queries, positions, keys_of_head, slabs, kv_head, table, low, end, full_to, end,
        True, KEYS, HEAD_DIM, WIDTH, KV_HEADS, PAGE, FACTOR, CAP, WINDOW, BULK, STAGES,
    )  # fmt: skip
    tl.store(out + at * out_stride + inner, (acc / total[:, None]).to(out.dtype.element_ty), mask=real)


@dataclass(frozen=True, slots=True)
class PrefillShape:
    """How the kernel cuts the work."""

    rows: int  # of a tile: tokens * packed query heads
    keys: int  # of a block; a power of two, as page sizes are
    warps: int
    stages: int
    pack: int  # query heads of one KV head in a tile; divides their number
    bulk: bool = False  # K and V by Hopper's bulk tensor copies; keys <= page_size

    @property
    def tokens(self) -> int:
        """Query tokens of a tile."""
        return self.rows // self.pack


def prefill_shape(heads: int, kv_heads: int, head_dim: int, page_size: int, dtype: torch.dtype) -> PrefillShape:
    """The fastest measured one. Nothing else may enter the choice: results depend on it in the last bits."""
    group = heads // kv_heads
    pack = max(n for n in range(1, min(group, MAX_PACK) + 1) if group % n == 0)
    if dtype == torch.float32:
        return PrefillShape(rows=64, keys=32, warps=8, stages=1, pack=pack)
    if head_dim > 128:
        return PrefillShape(rows=128, keys=64, warps=8, stages=2, pack=pack)
    return PrefillShape(rows=128, keys=64, warps=8, stages=3, pack=pack)


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
        GROUP=heads // kv_heads,
        PACK=shape.pack,
        ROWS=shape.rows,
        KEYS=shape.keys,
        HEAD_DIM=head_dim,
        WIDTH=width,
        KV_HEADS=kv_heads,
        PAGE=page_size,
        FACTOR=scale * LOG2E.value,
        CAP=cap,
        WINDOW=window,
        BULK=shape.bulk,
        STAGES=shape.stages,
        num_warps=shape.warps,
    )
