"""Matrix products for `--batch-invariant`: a row's result is the same bits whatever rows are beside it.

The order of every sum depends on the weight's shape alone: blocks of one size whatever the number of rows, and depth k
cut into parts whose sums are added from the first to the last. With few rows each part has its own program (else a
weight of 4096 rows would keep a quarter of the GPU busy), and the last to arrive adds the parts; with many rows one
program computes part after part and adds them in the same order. Why batches change results otherwise: He et al.,
"Defeating Nondeterminism in LLM Inference", Thinking Machines Lab 2025.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from .gemm import GemmWorkspace, aligned, ceil_div, check_operands

SPREAD = (
    264  # programs that fill the GPU, two a multiprocessor of an H200; a constant, for results that do not depend on it
)
LEAST_PART = 512  # of k
MOST_PROGRAMS = 1056  # with a program a part: bounds the workspace to 69 MB
GROUP = 16  # tiles of x whose products with the same rows of the weight are made together, for the L2 cache's sake


@dataclass(frozen=True, slots=True)
class _Blocks:
    """Tile sizes: constants of a type, since sums depend on them."""

    m: int
    n: int
    k: int
    num_warps: int
    num_stages: int


def _blocks(dtype: torch.dtype) -> _Blocks:
    return _Blocks(64, 64, 32, 8, 2) if dtype == torch.float32 else _Blocks(128, 128, 64, 8, 3)


@triton.jit
def _part_sum(
    x, weight, m, n, k, x_stride, x_row, tile_row, first, last, row, column, element,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Blocks [first, last) of a tile's depth, summed: [BLOCK_N, BLOCK_M]."""
    acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    if TMA:
        for block in range(first, last):
            w = weight.load([tile_row, block * BLOCK_K])
            rows = x.load([x_row, block * BLOCK_K])
            acc = tl.dot(w, tl.trans(rows), acc, input_precision=PRECISION)
    else:
        w_at = weight + tile_row.to(tl.int64) * k + tl.minimum(row, n - 1 - tile_row)[:, None] * k + element[None, :]
        x_at = x + (x_row + column)[None, :].to(tl.int64) * x_stride + element[:, None]
        inside = (x_row + column < m)[None, :]
        for block in range(first, last):
            left = k - block * BLOCK_K
            w = tl.load(w_at + block * BLOCK_K, mask=element[None, :] < left, other=0.0)
            rows = tl.load(x_at + block * BLOCK_K, mask=inside & (element[:, None] < left), other=0.0)
            acc = tl.dot(w, rows, acc, input_precision=PRECISION)
    return acc


@triton.jit(do_not_specialize=["m"])
def _invariant_kernel(
    x, weight, bias, out, partials, counters, m, n, k, x_stride, out_stride, depth, parts,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, HAS_BIAS: tl.constexpr,
    APART: tl.constexpr, GROUP: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (tiles, parts if APART else 1); a part is `depth` blocks of k."""
    x_tiles = tl.cdiv(m, BLOCK_M)
    n_tiles = tl.cdiv(n, BLOCK_N)
    number = tl.program_id(0)
    group = number // (GROUP * n_tiles)
    height = tl.minimum(x_tiles - group * GROUP, GROUP)
    x_row = (group * GROUP + number % (GROUP * n_tiles) % height) * BLOCK_M
    tile_row = number % (GROUP * n_tiles) // height * BLOCK_N
    blocks = tl.cdiv(k, BLOCK_K)
    row = tl.arange(0, BLOCK_N)
    column = tl.arange(0, BLOCK_M)
    element = tl.arange(0, BLOCK_K)
    total = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    complete = True
    if APART:
        part = tl.program_id(1)
        acc = _part_sum(
            x, weight, m, n, k, x_stride, x_row, tile_row, part * depth, tl.minimum(blocks, part * depth + depth),
            row, column, element, BLOCK_M, BLOCK_N, BLOCK_K, TMA, PRECISION,
        )  # fmt: skip
        own = partials + number.to(tl.int64) * parts * (BLOCK_M * BLOCK_N) + column[None, :] * BLOCK_N + row[:, None]
        inside = (x_row + column < m)[None, :]
        tl.store(own + part.to(tl.int64) * (BLOCK_M * BLOCK_N), acc, mask=inside)
        tl.debug_barrier()  # the count is one thread's, and releases what all of them stored
        complete = tl.atomic_add(counters + number, 1, sem="acq_rel", scope="gpu") == parts - 1
        if complete:
            for _ in range(parts):
                total += tl.load(own, mask=inside, other=0.0, cache_modifier=".cg")
                own += BLOCK_M * BLOCK_N
            tl.store(counters + number, 0)
    else:
        for part in range(parts):
            total += _part_sum(
                x, weight, m, n, k, x_stride, x_row, tile_row, part * depth, tl.minimum(blocks, part * depth + depth),
                row, column, element, BLOCK_M, BLOCK_N, BLOCK_K, TMA, PRECISION,
            )  # fmt: skip
    if complete:
        out_row = tile_row + row
        if HAS_BIAS:
            total += tl.load(bias + out_row, mask=out_row < n, other=0.0).to(tl.float32)[:, None]
        out_at = out + (x_row + column)[None, :].to(tl.int64) * out_stride + out_row[:, None]
        inside_out = (x_row + column < m)[None, :] & (out_row < n)[:, None]
        tl.store(out_at, total.to(out.dtype.element_ty), mask=inside_out)


@dataclass(frozen=True, slots=True)
class _Cut:
    """How a product is cut. `depth` and `parts` come from the weight alone."""

    tiles: int
    depth: int
    parts: int
    apart: bool  # a program a part

    @classmethod
    def of(cls, m: int, n: int, k: int, blocks: _Blocks) -> "_Cut":
        rows, total = ceil_div(n, blocks.n), ceil_div(k, blocks.k)
        wanted = min(ceil_div(SPREAD, rows), max(1, k // LEAST_PART))
        depth = ceil_div(total, wanted)
        parts = ceil_div(total, depth)
        tiles = rows * ceil_div(m, blocks.m)
        return cls(tiles, depth, parts, parts > 1 and tiles < SPREAD and tiles * parts <= MOST_PROGRAMS)


def invariant_workspace(
    device: torch.device, shapes: Sequence[tuple[int, int]], rows: int, dtype: torch.dtype
) -> GemmWorkspace:
    """Enough for every invariant product of up to `rows` rows with weights of these shapes [n, k]."""
    blocks, floats, counters = _blocks(dtype), 0, 0
    for n, k in shapes:
        for m in range(1, rows + 1, blocks.m):
            cut = _Cut.of(m, n, k, blocks)
            if cut.apart:
                floats = max(floats, cut.tiles * cut.parts * blocks.m * blocks.n)
                counters = max(counters, cut.tiles)
    return GemmWorkspace(device, floats=floats, counters=counters)


def invariant_linear_(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, workspace: GemmWorkspace) -> None:
    """out = x W^T + b; each row's result depends on that row and the weight alone, bit for bit.

    `x`: [m, k], rows contiguous; `weight`: [n, k], contiguous; `bias`: [n] or None; `out`: [m, n], rows contiguous.
    fp32 accumulation. Allocates nothing. Raises ValueError for shapes, layouts or a workspace that do not fit.
    """
    blocks = _blocks(x.dtype)
    m, k = x.shape
    n = weight.shape[0]
    cut = _Cut.of(m, n, k, blocks)
    floats, counters = (cut.tiles * cut.parts * blocks.m * blocks.n, cut.tiles) if cut.apart else (0, 0)
    check_operands(x, weight, out, workspace, floats, counters)
    if m == 0:
        return
    tma = aligned(x) and aligned(weight)
    operands: tuple[Any, Any] = (x, weight)
    if tma:
        operands = (
            TensorDescriptor(x, [m, k], [x.stride(0), 1], [blocks.m, blocks.k]),
            TensorDescriptor(weight, [n, k], [k, 1], [blocks.n, blocks.k]),
        )
    _invariant_kernel[(cut.tiles, cut.parts if cut.apart else 1)](
        *operands, weight if bias is None else bias, out, workspace.partials, workspace.counters,
        m, n, k, x.stride(0), out.stride(0), cut.depth, cut.parts,
        BLOCK_M=blocks.m, BLOCK_N=blocks.n, BLOCK_K=blocks.k, HAS_BIAS=bias is not None, APART=cut.apart,
        GROUP=GROUP, TMA=tma, PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=blocks.num_warps, num_stages=blocks.num_stages,
    )  # fmt: skip
