"""Prefill attention for Hopper GPUs in Gluon, with a warp that copies and eight that compute.

The work is cut as in prefill_attention.py, and the same holds for the bits of a row's result. Keys beyond the sequence
are kept out; those that it has written must be finite.
"""

from typing import Any

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from .hopper_copies import COLUMNS, FLAT, copy_blocks
from .hopper_parts import parts_attention
from .hopper_turns import LOG2E, as_operand, barrier, take_turns, weigh
from .prefill_shape import PrefillShape

MAX_ROW = 2**31  # of a pool seen as rows: the copies' coordinates are int32
COPY_REGISTERS = gl.constexpr(24)  # of a thread that copies; the others share the rest


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
    open_gate,
    first_head,
    first_token,
    count,
    start,
    origin,
    end,
    pack: gl.constexpr,
    row_count: gl.constexpr,
    block: gl.constexpr,
    head_dim: gl.constexpr,
    width: gl.constexpr,
    factor: gl.constexpr,
    cap: gl.constexpr,
    window: gl.constexpr,
    stages: gl.constexpr,
):
    """The other warps: row r is query head first_head + r % pack at token r // pack of the tile."""
    warps: gl.constexpr = gl.num_warps()
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, block, 16])
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, width, 16])
    copied: gl.constexpr = gl.BlockedLayout([1, 8], [256 // width, width // 8], [warps, 1], [1, 0])
    dtype: gl.constexpr = q.dtype.element_ty
    rows = gl.arange(0, row_count, layout=gl.SliceLayout(1, copied))
    dims = gl.arange(0, width, layout=gl.SliceLayout(0, copied))
    real = ((rows // pack < count) & (rows < row_count // pack * pack))[:, None] & (dims < head_dim)[None, :]
    inner = ((first_head + rows % pack) * head_dim)[:, None] + dims[None, :]
    at = (first_token + rows // pack).to(gl.int64)[:, None]
    values = gl.load(q + at * q_stride + inner, mask=real, other=0.0)
    queries = gl.allocate_shared_memory(dtype, [row_count, width], FLAT, values)
    hopper.fence_async_shared()
    barrier()

    blocks = (end - origin + block - 1) // block
    full_to = gl.maximum((start + 1 - origin) // block, 1)  # blocks below it hide nothing from the first row
    positions = start + gl.minimum(
        gl.arange(0, row_count, layout=gl.SliceLayout(1, score_layout)) // pack, end - start - 1
    )
    total = gl.zeros([row_count], gl.float32, gl.SliceLayout(1, score_layout))
    top = gl.full([row_count], float("-inf"), gl.float32, gl.SliceLayout(1, score_layout))
    mbarrier.wait(ready.index(0), 0)
    k_block = k_tiles._reinterpret(dtype, [stages, block, width], FLAT).index(0)
    zeros = gl.zeros([row_count, block], gl.float32, score_layout)
    scores = hopper.warpgroup_mma(queries, k_block.permute((1, 0)), zeros, use_acc=False)
    shares, _, total, top = weigh(scores, total, top, positions, origin, True, factor, cap, window)
    mbarrier.wait(ready.index(1), 0)
    weights = as_operand(shares, dtype, acc_layout)
    acc = gl.zeros([row_count, width], gl.float32, acc_layout)
    full_from = 1
    if window > 0:
        full_from = (gl.maximum(end - window, 0) - origin + block - 1) // block
        full_from = gl.maximum(gl.minimum(full_from, full_to), 1)
        acc, weights, total, top = take_turns(
            acc, weights, total, top, positions, queries, k_tiles, v_tiles, ready, free, open_gate,
            origin, 1, full_from, True, factor, cap, window, stages, score_layout, acc_layout,
        )  # fmt: skip
    acc, weights, total, top = take_turns(
        acc, weights, total, top, positions, queries, k_tiles, v_tiles, ready, free, open_gate,
        origin, full_from, full_to, False, factor, cap, window, stages, score_layout, acc_layout,
    )  # fmt: skip
    acc, weights, total, top = take_turns(
        acc, weights, total, top, positions, queries, k_tiles, v_tiles, ready, free, open_gate,
        origin, full_to, blocks, True, factor, cap, window, stages, score_layout, acc_layout,
    )  # fmt: skip

    v_block = v_tiles._reinterpret(dtype, [stages, block, width], FLAT).index(blocks % stages)
    if end % block != 0:  # what lies beyond may be NaN, and 0 * NaN is NaN
        keys = origin + (blocks - 1) * block + gl.arange(0, block, layout=gl.SliceLayout(1, copied))
        v = v_block.load(copied)
        v_block.store(gl.where((keys < end)[:, None], v, gl.zeros_like(v)))
        hopper.fence_async_shared()
        barrier()
    acc = hopper.warpgroup_mma(weights, v_block, acc)
    acc = acc / gl.convert_layout(total, gl.SliceLayout(1, acc_layout))[:, None]
    gl.store(out + at * out_stride + inner, gl.convert_layout(acc.to(dtype), copied), mask=real)


@gluon.jit(do_not_specialize_on_alignment=["tiles"])
def _prefill_kernel(
    q,
    slabs,
    tables,
    tiles,
    out,
    q_stride,
    out_stride,
    table_stride,
    group: gl.constexpr,
    pack: gl.constexpr,
    row_count: gl.constexpr,
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
    """Program (head block, tile)."""
    dtype: gl.constexpr = q.dtype.element_ty
    rows: gl.constexpr = page_size if page_size < block else block
    parts: gl.constexpr = block // rows * (width // COLUMNS)
    tile = tiles + gl.program_id(1) * 4
    slot, first_token = gl.load(tile), gl.load(tile + 1)
    count, start = gl.load(tile + 2), gl.load(tile + 3)
    first_head = gl.program_id(0) * pack
    table = tables + slot.to(gl.int64) * table_stride
    origin = gl.to_tensor(0)
    if window > 0:
        origin = gl.maximum(start + 1 - window, 0) // block * block

    k_tiles = gl.allocate_shared_memory(dtype, [stages * parts, rows, COLUMNS], FLAT)
    v_tiles = gl.allocate_shared_memory(dtype, [stages * parts, rows, COLUMNS], FLAT)
    ready = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    open_gate = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(open_gate, count=1)
    for i in gl.static_range(stages):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(free.index(i), count=1)
    hopper.fence_async_shared()
    barrier()
    end = start + gl.maximum(count, 1)  # a tile of no tokens runs as well, and stores nothing
    gl.warp_specialize(  # the tuples stand here because a name would make run-time values of the constants in them
        [
            (_compute, (
                q, out, q_stride, out_stride, k_tiles, v_tiles, ready, free, open_gate,
                first_head, first_token, count, start, origin, end,
                pack, row_count, block, head_dim, width, factor, cap, window, stages,
            )),
            (copy_blocks, (
                slabs, k_tiles, v_tiles, ready, free, table, first_head // group, origin, end,
                stages, block, width, kv_heads, page_size,
            )),
        ],
        [1],
        [COPY_REGISTERS],
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
    """As `prefill_attention`, on a GPU of compute capability 9.0, for 16-bit types.

    `shape.stages` blocks of K and as many of V are in shared memory; 2 at least.
    """
    if tiles.shape[0] == 0:
        return
    head_dim = pool.shape[-1]
    flat = pool.view(-1, head_dim)
    if flat.shape[0] > MAX_ROW or pool.dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(f"a pool of {flat.shape[0]} rows of {pool.dtype}")
    slabs = TensorDescriptor.from_tensor(flat, [min(page_size, shape.keys), COLUMNS.value], FLAT.value)
    sizes: dict[str, Any] = {
        "group": heads // kv_heads,
        "pack": shape.pack,
        "block": shape.keys,
        "head_dim": head_dim,
        "width": max(COLUMNS.value, triton.next_power_of_2(head_dim)),
        "kv_heads": kv_heads,
        "page_size": page_size,
        "factor": scale * LOG2E.value,
        "cap": cap,
        "window": window,
        "stages": shape.stages,
    }
    if shape.partitions > 1:
        parts_attention(q, slabs, tables, tiles, out, heads // shape.pack, shape, sizes)
        return
    _prefill_kernel[(heads // shape.pack, tiles.shape[0])](
        q,
        slabs,
        tables,
        tiles,
        out,
        q.stride(0),
        out.stride(0),
        tables.stride(0),
        **sizes,
        row_count=shape.rows,
        num_warps=shape.warps,
    )
