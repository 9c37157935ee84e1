"""Matrix products of few rows: out = x W^T + b, with the weight as the first operand of the tensor cores.

A product of a decode step is bound by reading W [n, k] once, so the work is cut along W: tiles of `block_n` weight
rows, each `ceil(k / block_k)` blocks deep, laid end to end and dealt to a fixed number of programs in equal, contiguous
shares (Osama et al., "Stream-K: Work-centric Parallel Decomposition for Dense Matrix-Matrix Multiplication on the GPU",
PPoPP 2023). So all multiprocessors end together whatever the shape; as many programs as tiles are the plain product, a
multiple of that is split-K. The product is the transposed one, W x^T: the weight's rows fill the 64 rows of
Hopper's `wgmma`, the batch is its N dimension (8 to 256), and a small batch wastes little.

A tile that several programs share is summed in fp32 by the one that arrives last, in the order of k, so results do not
depend on timing: only the arrival count is atomic.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from .gemv import gemv

TMA_ALIGNMENT = 16  # bytes: of a descriptor's base and strides


@dataclass(frozen=True, slots=True)
class Config:
    """How `gemm` cuts a product. Results are equal up to fp32 summation order, and repeatable for one config."""

    block_m: int  # rows of x a tile: 8 (tensor cores' least N) to 256; 1: a GEMV without tensor cores or partial sums
    block_n: int  # rows of the weight a tile
    block_k: int
    programs: int  # that share the weight; x's tiles of `block_m` rows each have as many
    num_warps: int
    num_stages: int
    tma: bool = False  # loads by tensor-map copies instead of pointers; needs rows aligned to 16 bytes
    pdl: bool = False  # may start before the kernel in front of it has ended (programmatic dependent launch)
    prefetch: int = 0  # with pdl: blocks of the weight that are asked for before that end

    def lanes(self, n: int, k: int) -> int:
        """Programs that get any work of a weight [n, k]."""
        return min(self.programs, ceil_div(n, self.block_n) * ceil_div(k, self.block_k))

    def partial_floats(self, m: int, n: int, k: int) -> int:
        """float32 values of workspace that a product of `m` rows needs."""
        if self.block_m == 1:
            return 0
        return ceil_div(m, self.block_m) * self.lanes(n, k) * 2 * self.block_m * self.block_n

    def counters(self, m: int, n: int) -> int:
        """Arrival counts that a product of `m` rows needs."""
        return 0 if self.block_m == 1 else ceil_div(m, self.block_m) * ceil_div(n, self.block_n)


class GemmWorkspace:
    """Partial sums and arrival counts; one per stream, shared by all products on it, which are in order."""

    def __init__(self, device: torch.device, *, floats: int, counters: int) -> None:
        """`floats`, `counters`: the largest `Config.partial_floats` and `Config.counters` among the products."""
        self.partials = torch.empty(max(floats, 1), dtype=torch.float32, device=device)
        self.counters = torch.zeros(max(counters, 1), dtype=torch.int32, device=device)  # every launch leaves zeros

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return self.partials.nbytes + self.counters.nbytes


def ceil_div(value: int, unit: int) -> int:
    """value / unit, rounded up."""
    return -(-value // unit)


@triton.jit
def _share_begin(lane, base, rest):
    """First block of a lane's share: the first `rest` lanes have base + 1 blocks, the others base."""
    return lane * base + tl.minimum(lane, rest)


@triton.jit
def _share_of(block, base, rest):
    """The lane whose share holds a block."""
    long = rest * (base + 1)
    return tl.where(block < long, block // (base + 1), rest + (block - long) // base)


@triton.jit
def _prefetch_l2(pointers):
    """Asks L2 for the lines of the pointers, without waiting."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit(do_not_specialize=["m"])
def _gemm_kernel(
    x, weight, bias, out, partials, counters, m, n, k, x_stride, out_stride, lanes,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, HAS_BIAS: tl.constexpr,
    EVEN_K: tl.constexpr, TMA: tl.constexpr, PDL: tl.constexpr, PREFETCH: tl.constexpr, PRECISION: tl.constexpr,
    weight_pointer,
):  # fmt: skip
    """Grid (tiles of x, lanes). x [m, k], weight [n, k]: pointers, or with TMA descriptors of blocks of them."""
    x_tile = tl.program_id(0)
    lane = tl.program_id(1)
    depth = tl.cdiv(k, BLOCK_K)
    blocks = tl.cdiv(n, BLOCK_N) * depth
    base = blocks // lanes
    rest = blocks - base * lanes
    begin = _share_begin(lane, base, rest)
    end = _share_begin(lane + 1, base, rest)
    row = tl.arange(0, BLOCK_N)
    column = x_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    element = tl.arange(0, BLOCK_K)
    inside = column < m
    if PDL:
        if PREFETCH > 0:  # the weight does not depend on the kernel in front
            first_row = (begin // depth) * BLOCK_N
            line = tl.arange(0, BLOCK_K // 64) * 64
            at = weight_pointer + first_row.to(tl.int64) * k + tl.minimum(row, n - 1 - first_row)[:, None] * k
            for ahead in tl.static_range(PREFETCH):
                column_k = (begin % depth + ahead) * BLOCK_K + line
                _prefetch_l2(at + tl.minimum(column_k, k - 1)[None, :])
        gdc_wait()
        gdc_launch_dependents()

    done = begin
    while done < end:
        tile = done // depth
        first = done - tile * depth
        last = tl.minimum(depth, first + end - done)
        tile_row = tile * BLOCK_N
        acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
        if TMA:
            for block in range(first, last):
                w = weight.load([tile_row, block * BLOCK_K])  # [BLOCK_N, BLOCK_K]
                rows = x.load([x_tile * BLOCK_M, block * BLOCK_K])  # [BLOCK_M, BLOCK_K]
                acc = tl.dot(w, tl.trans(rows), acc, input_precision=PRECISION)
        else:
            # Rows past the weight's last repeat it: what they give is not stored.
            w_at = (
                weight + tile_row.to(tl.int64) * k + tl.minimum(row, n - 1 - tile_row)[:, None] * k + element[None, :]
            )
            x_at = x + column[None, :].to(tl.int64) * x_stride + element[:, None]
            for block in range(first, last):
                if EVEN_K:
                    w = tl.load(w_at + block * BLOCK_K, eviction_policy="evict_first")
                    rows = tl.load(x_at + block * BLOCK_K, mask=inside[None, :], other=0.0)
                else:
                    left = k - block * BLOCK_K
                    w = tl.load(w_at + block * BLOCK_K, mask=element[None, :] < left, other=0.0)
                    rows = tl.load(x_at + block * BLOCK_K, mask=inside[None, :] & (element[:, None] < left), other=0.0)
                acc = tl.dot(w, rows, acc, input_precision=PRECISION)

        complete = last - first == depth
        if not complete:
            cell = tl.arange(0, BLOCK_M)[None, :] * BLOCK_N + row[:, None]
            slots = partials + x_tile.to(tl.int64) * lanes * (2 * BLOCK_M * BLOCK_N)
            own = lane * 2 + (done > begin).to(tl.int32)  # a lane has at most a first and a last tile that it shares
            tl.store(slots + own.to(tl.int64) * (BLOCK_M * BLOCK_N) + cell, acc, mask=inside[None, :])
            first_lane = _share_of(tile * depth, base, rest)
            last_lane = _share_of(tile * depth + depth - 1, base, rest)
            counter = counters + x_tile * tl.cdiv(n, BLOCK_N) + tile
            tl.debug_barrier()  # the count is one thread's, and releases what all of them stored
            arrived = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
            complete = arrived == last_lane - first_lane
            if complete:
                acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
                for giver in range(first_lane, last_lane + 1):
                    slot = giver * 2 + (_share_begin(giver, base, rest) < tile * depth).to(tl.int32)
                    acc += tl.load(
                        slots + slot.to(tl.int64) * (BLOCK_M * BLOCK_N) + cell,
                        mask=inside[None, :], other=0.0, cache_modifier=".cg",
                    )  # fmt: skip
                tl.store(counter, 0)
        if complete:
            out_row = tile_row + row
            if HAS_BIAS:
                acc += tl.load(bias + out_row, mask=out_row < n, other=0.0).to(tl.float32)[:, None]
            out_at = out + column[None, :].to(tl.int64) * out_stride + out_row[:, None]
            tl.store(out_at, acc.to(out.dtype.element_ty), mask=inside[None, :] & (out_row[:, None] < n))
        done += last - first


def check_operands(
    x: Tensor, weight: Tensor, out: Tensor, workspace: GemmWorkspace, floats: int, counters: int
) -> None:
    """Raises ValueError where x [m, k], weight [n, k] and out [m, n] do not fit, or the workspace is too small."""
    m, k = x.shape
    n = weight.shape[0]
    if weight.shape != (n, k) or out.shape != (m, n):
        raise ValueError(f"x {tuple(x.shape)}, weight {tuple(weight.shape)} and out {tuple(out.shape)} do not fit")
    if not weight.is_contiguous() or x.stride(1) != 1 or out.stride(1) != 1:
        raise ValueError("the weight must be contiguous, and the rows of x and out")
    if x.dtype != weight.dtype:
        raise ValueError(f"x is {x.dtype}, the weight {weight.dtype}")
    if workspace.partials.numel() < floats or workspace.counters.numel() < counters:
        raise ValueError(f"the workspace is too small: {floats} partial sums and {counters} counters are needed")


def aligned(tensor: Tensor) -> bool:
    """Whether a tensor-map copy may read a matrix."""
    return tensor.data_ptr() % TMA_ALIGNMENT == 0 and tensor.stride(0) * tensor.element_size() % TMA_ALIGNMENT == 0


def gemm(
    x: Tensor, weight: Tensor, out: Tensor, *, config: Config, workspace: GemmWorkspace, bias: Tensor | None = None
) -> None:
    """out = x W^T + bias, fp32 accumulation, one rounding.

    `x`: [m, k], rows contiguous; `weight`: [n, k], contiguous, x's dtype; `out`: [m, n], rows contiguous; `bias`: [n].
    Sizes need not be multiples of the blocks. Raises ValueError for shapes, layouts or a workspace that do not fit.
    """
    m, k = x.shape
    n = weight.shape[0]
    check_operands(x, weight, out, workspace, config.partial_floats(m, n, k), config.counters(m, n))
    if m == 0:
        return
    if config.block_m == 1:
        gemv(
            x, weight, out, bias=bias, block_n=config.block_n, block_k=config.block_k,
            num_warps=config.num_warps, num_stages=config.num_stages, pdl=config.pdl,
        )  # fmt: skip
        return
    if config.tma and not (aligned(x) and aligned(weight)):
        config = replace(config, tma=False)
    lanes = config.lanes(n, k)
    operands: tuple[Any, Any] = (x, weight)
    if config.tma:
        operands = (
            TensorDescriptor(x, [m, k], [x.stride(0), 1], [config.block_m, config.block_k]),
            TensorDescriptor(weight, [n, k], [k, 1], [config.block_n, config.block_k]),
        )
    _gemm_kernel[(ceil_div(m, config.block_m), lanes)](
        *operands, weight if bias is None else bias, out, workspace.partials, workspace.counters,
        m, n, k, x.stride(0), out.stride(0), lanes,
        BLOCK_M=config.block_m, BLOCK_N=config.block_n, BLOCK_K=config.block_k, HAS_BIAS=bias is not None,
        EVEN_K=k % config.block_k == 0, TMA=config.tma, PDL=config.pdl, PREFETCH=config.prefetch,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32", weight_pointer=weight,
        num_warps=config.num_warps, num_stages=config.num_stages, launch_pdl=config.pdl,
    )  # fmt: skip
