"""One row of x against every row of a weight, without tensor cores: out = x W^T + b for a batch of 1.

Each program takes a few rows of the weight over their whole depth, straight into registers: no partial sums to merge,
nothing to wait for, and even a matrix of 4096 rows gives every multiprocessor several programs with loads in flight.
"""

import triton
import triton.language as tl
from torch import Tensor

from .overlap import start_with_weight


@triton.jit
def _gemv_kernel(
    x, weight, bias, out, n, k, x_stride, out_stride,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, HAS_BIAS: tl.constexpr, EVEN_K: tl.constexpr,
    PDL: tl.constexpr, PREFETCH: tl.constexpr,
):  # fmt: skip
    """Grid (rows of x, tiles of BLOCK_N weight rows). x [m, k], weight [n, k], out [m, n]."""
    x_row = tl.program_id(0).to(tl.int64)
    first_row = tl.program_id(1) * BLOCK_N
    row = tl.arange(0, BLOCK_N)
    element = tl.arange(0, BLOCK_K)
    if PDL:
        x += start_with_weight(weight, first_row, 0, n, k, BLOCK_N, BLOCK_K, PREFETCH)
    w_at = weight + first_row.to(tl.int64) * k + tl.minimum(row, n - 1 - first_row)[:, None] * k + element[None, :]
    x_at = x + x_row * x_stride + element
    acc = tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32)
    for start in tl.range(0, k, BLOCK_K, num_stages=STAGES):
        if EVEN_K:
            w = tl.load(w_at + start, eviction_policy="evict_first")
            values = tl.load(x_at + start)
        else:
            w = tl.load(w_at + start, mask=element[None, :] < k - start, other=0.0)
            values = tl.load(x_at + start, mask=element < k - start, other=0.0)
        acc += w.to(tl.float32) * values.to(tl.float32)[None, :]
    total = tl.sum(acc, axis=1)
    out_row = first_row + row
    if HAS_BIAS:
        total += tl.load(bias + out_row, mask=out_row < n, other=0.0).to(tl.float32)
    tl.store(out + x_row * out_stride + out_row, total.to(out.dtype.element_ty), mask=out_row < n)


def gemv(
    x: Tensor, weight: Tensor, out: Tensor, *, bias: Tensor | None, block_n: int, block_k: int,
    num_warps: int, num_stages: int, pdl: bool, prefetch: int = 0, compile_only: bool = False,
) -> None:  # fmt: skip
    """out = x W^T + bias, fp32 accumulation; `x`: [m, k], `weight`: [n, k] contiguous, `out`: [m, n], `bias`: [n].

    Each row of x reads the whole weight: meant for one. The rows of x and out are contiguous; the caller has checked.
    """
    m, k = x.shape
    n = weight.shape[0]
    _gemv_kernel.run(
        x, weight, weight if bias is None else bias, out, n, k, x.stride(0), out.stride(0),
        BLOCK_N=block_n, BLOCK_K=block_k, STAGES=num_stages, HAS_BIAS=bias is not None, EVEN_K=k % block_k == 0,
        PDL=pdl, PREFETCH=prefetch, num_warps=num_warps, launch_pdl=pdl,
        grid=(m, triton.cdiv(n, block_n)), warmup=compile_only,
    )  # fmt: skip
