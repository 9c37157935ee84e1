"""Prefill attention for Hopper GPUs in Gluon: a warp copies, and two warpgroups compute 64 rows of the tile each.

The warpgroups share K and V and meet nowhere: while the one turns scores into weights, the other has the matrix units
(FlashAttention-3, Shah 2024). A program stays on its multiprocessor for several tiles. The work is cut as in
prefill_attention.py, and the same holds for the bits of a row's result. Keys beyond the sequence are kept out; those
that it has written must be finite.
"""

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from .hopper_copies import COLUMNS, FLAT, copy_tiles
from .hopper_items import item, item_count, tile_keys
from .hopper_turns import LOG2E, PARTS, as_operand, await_turn, barrier, spread, take_turns, weigh
from .prefill_shape import PrefillShape

ROWS = gl.constexpr(64)  # of a part: what a warpgroup multiplies at a time
WARPS = 4  # of a part
COPY_REGISTERS = gl.constexpr(24)  # of a thread that copies
REGISTERS = gl.constexpr(240)  # of one that computes, of 65536 in all
MAX_ROW = 2**31  # of a pool seen as rows: the copies' coordinates are int32


@gluon.jit
def _compute(
    q,
    out,
    q_stride,
    out_stride,
    k_tiles,
    v_tiles,
    ready,
    free,
    order,
    tiles,
    items,
    head_blocks: gl.constexpr,
    pack: gl.constexpr,
    block: gl.constexpr,
    head_dim: gl.constexpr,
    width: gl.constexpr,
    factor: gl.constexpr,
    cap: gl.constexpr,
    window: gl.constexpr,
    stages: gl.constexpr,
    part: gl.constexpr,
):
    """A warpgroup: row r of the tile is query head r % pack of the head block at token r // pack."""
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, block, 16])
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, width, 16])
    copied: gl.constexpr = gl.BlockedLayout([1, 8], [256 // width, width // 8], [4, 1], [1, 0])
    dtype: gl.constexpr = q.dtype.element_ty
    first_row: gl.constexpr = part * ROWS
    k_blocks = k_tiles._reinterpret(dtype, [stages, block, width], FLAT)
    v_blocks = v_tiles._reinterpret(dtype, [stages, block, width], FLAT)
    rows = first_row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, copied))
    dims = gl.arange(0, width, layout=gl.SliceLayout(0, copied))
    tokens = (first_row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, score_layout))) // pack

    taken, use, turn = item_count(items), gl.to_tensor(0), gl.to_tensor(0)
    head_block, _, first_token, count, start = item(tiles, 0, taken, head_blocks)
    for i in range(taken):
        real = ((rows // pack < count) & (rows < PARTS * ROWS // pack * pack))[:, None] & (dims < head_dim)[None, :]
        inner = ((head_block * pack + rows % pack) * head_dim)[:, None] + dims[None, :]
        at = (first_token + rows // pack).to(gl.int64)[:, None]
        values = gl.load(q + at * q_stride + inner, mask=real, other=0.0)
        queries = gl.allocate_shared_memory(dtype, [ROWS, width], FLAT, values)
        hopper.fence_async_shared()
        barrier()

        origin, end = tile_keys(count, start, block, window)
        blocks = (end - origin + block - 1) // block
        positions = start + gl.minimum(tokens, end - start - 1)
        lowest = start + gl.minimum(first_row // pack, end - start - 1)
        full_to = gl.maximum((lowest + 1 - origin) // block, 1)  # blocks below it hide nothing from the first row
        mbarrier.wait(ready.index(use % stages), (use // stages) & 1)
        zeros = gl.zeros([ROWS, block], gl.float32, score_layout)
        total = gl.sum(spread(zeros), 1)
        top = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, score_layout))
        await_turn(order, turn, part)
        k_block = k_blocks.index(use % stages).permute((1, 0))
        scores = hopper.warpgroup_mma(queries, k_block, zeros, use_acc=False, is_async=True)
        mbarrier.arrive(order.index((part + 1) % PARTS))
        scores = hopper.warpgroup_mma_wait(0, deps=[scores])
        shares, _, total, top = weigh(scores, total, top, positions, origin, True, factor, cap, window)
        mbarrier.wait(ready.index((use + 1) % stages), ((use + 1) // stages) & 1)
        weights = as_operand(shares, dtype, acc_layout)
        acc = gl.zeros([ROWS, width], gl.float32, acc_layout)
        full_from = 1
        if window > 0:
            full_from = (gl.maximum(end - window, 0) - origin + block - 1) // block
            full_from = gl.maximum(gl.minimum(full_from, full_to), 1)
            acc, shares, weights, total, top = take_turns(
                acc, shares, weights, total, top, positions, queries, k_tiles, v_tiles, ready, free, order,
                use, turn, origin, 1, full_from, True, factor, cap, window, stages, acc_layout, part,
            )  # fmt: skip
        acc, shares, weights, total, top = take_turns(
            acc, shares, weights, total, top, positions, queries, k_tiles, v_tiles, ready, free, order,
            use, turn, origin, full_from, full_to, False, factor, cap, window, stages, acc_layout, part,
        )  # fmt: skip
        acc, shares, weights, total, top = take_turns(
            acc, shares, weights, total, top, positions, queries, k_tiles, v_tiles, ready, free, order,
            use, turn, origin, full_to, blocks, True, factor, cap, window, stages, acc_layout, part,
        )  # fmt: skip

        turn += blocks
        use += blocks
        v_block = v_blocks.index(use % stages)
        if end % block != 0:  # what lies beyond may be NaN, and 0 * NaN is NaN; the parts write the same
            keys = origin + (blocks - 1) * block + gl.arange(0, block, layout=gl.SliceLayout(1, copied))
            v = v_block.load(copied)
            v_block.store(gl.where((keys < end)[:, None], v, gl.zeros_like(v)))
            hopper.fence_async_shared()
            barrier()
        acc = hopper.warpgroup_mma(weights, v_block, acc)
        barrier()  # all warps are done with the last two stages
        mbarrier.arrive(free.index((use - 1) % stages))
        mbarrier.arrive(free.index(use % stages))
        use += 1
        acc = acc / gl.convert_layout(gl.sum(gl.sum(total, 2), 1), gl.SliceLayout(1, acc_layout))[:, None]
        gl.store(out + at * out_stride + inner, gl.convert_layout(acc.to(dtype), copied), mask=real)
        barrier()  # the next queries come to where this was converted
        head_block, _, first_token, count, start = item(tiles, i + 1, taken, head_blocks)


@gluon.jit(do_not_specialize=["items"], do_not_specialize_on_alignment=["tiles"])
def _prefill_kernel(
    q,
    slabs,
    tables,
    tiles,
    out,
    q_stride,
    out_stride,
    table_stride,
    items,  # tiles * head blocks
    head_blocks: gl.constexpr,
    group: gl.constexpr,
    pack: gl.constexpr,
    block: gl.constexpr,
    head_dim: gl.constexpr,
    width: gl.constexpr,
    kv_heads: gl.constexpr,
    page_size: gl.constexpr,
    factor: gl.constexpr,
    cap: gl.constexpr,
    window: gl.constexpr,
    stages: gl.constexpr,
):
    """As many programs as may run at once, or one an item."""
    dtype: gl.constexpr = q.dtype.element_ty
    rows: gl.constexpr = page_size if page_size < block else block
    pieces: gl.constexpr = block // rows * (width // COLUMNS)
    k_tiles = gl.allocate_shared_memory(dtype, [stages * pieces, rows, COLUMNS], FLAT)
    v_tiles = gl.allocate_shared_memory(dtype, [stages * pieces, rows, COLUMNS], FLAT)
    ready = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    order = gl.allocate_shared_memory(gl.int64, [PARTS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(stages):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(free.index(i), count=PARTS)
    for i in gl.static_range(PARTS):
        mbarrier.init(order.index(i), count=1)
    hopper.fence_async_shared()
    barrier()
    gl.warp_specialize(  # the tuples stand here because a name would make run-time values of the constants in them
        [
            (_compute, (
                q, out, q_stride, out_stride, k_tiles, v_tiles, ready, free, order, tiles, items, head_blocks,
                pack, block, head_dim, width, factor, cap, window, stages, 0,
            )),
            (_compute, (
                q, out, q_stride, out_stride, k_tiles, v_tiles, ready, free, order, tiles, items, head_blocks,
                pack, block, head_dim, width, factor, cap, window, stages, 1,
            )),
            (copy_tiles, (
                slabs, k_tiles, v_tiles, ready, free, tables, table_stride, tiles, items, head_blocks,
                group // pack, stages, block, width, kv_heads, page_size, window,
            )),
        ],
        [4, 1],
        [REGISTERS, COPY_REGISTERS],
    )  # fmt: skip


def hopper_attention(
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
    shape: PrefillShape,
) -> None:
    """As `prefill_attention`, on a GPU of compute capability 9.0, for 16-bit types and tiles of 128 rows.

    `shape.stages` blocks of K and as many of V are in shared memory; 2 at least.
    """
    if tiles.shape[0] == 0:
        return
    head_dim = pool.shape[-1]
    flat = pool.view(-1, head_dim)
    if flat.shape[0] > MAX_ROW or pool.dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(f"a pool of {flat.shape[0]} rows of {pool.dtype}")
    if shape.rows != PARTS.value * ROWS.value or shape.warps != PARTS.value * WARPS or shape.stages < 2:
        raise ValueError(f"cannot be cut so: {shape}")
    slabs = TensorDescriptor.from_tensor(flat, [min(page_size, shape.keys), COLUMNS.value], FLAT.value)
    items = tiles.shape[0] * (heads // shape.pack)
    _prefill_kernel[(min(items, torch.cuda.get_device_properties(q.device).multi_processor_count),)](
        q,
        slabs,
        tables,
        tiles,
        out,
        q.stride(0),
        out.stride(0),
        tables.stride(0),
        items,
        head_blocks=heads // shape.pack,
        group=heads // kv_heads,
        pack=shape.pack,
        block=shape.keys,
        head_dim=head_dim,
        width=max(COLUMNS.value, triton.next_power_of_2(head_dim)),
        kv_heads=kv_heads,
        page_size=page_size,
        factor=scale * LOG2E.value,
        cap=cap,
        window=window,
        stages=shape.stages,
        num_warps=WARPS,
    )
