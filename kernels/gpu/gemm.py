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
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from .gemv import gemv
from .stream_k import flat_kernel, tiles_kernel

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
    flat: bool = True  # one pipelined loop over a program's whole share, not one a tile
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
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    *,
    config: Config,
    workspace: GemmWorkspace,
    bias: Tensor | None = None,
    compile_only: bool = False,
) -> None:
    """out = x W^T + bias, fp32 accumulation, one rounding.

    `x`: [m, k], rows contiguous; `weight`: [n, k], contiguous, x's dtype; `out`: [m, n], rows contiguous; `bias`: [n].
    Sizes need not be multiples of the blocks. `compile_only` launches nothing. Raises ValueError for shapes, layouts or
    a workspace that do not fit.
    """
    m, k = x.shape
    n = weight.shape[0]
    check_operands(x, weight, out, workspace, config.partial_floats(m, n, k), config.counters(m, n))
    if m == 0:
        return
    if config.block_m == 1:
        gemv(
            x, weight, out, bias=bias, block_n=config.block_n, block_k=config.block_k, num_warps=config.num_warps,
            num_stages=config.num_stages, pdl=config.pdl, prefetch=config.prefetch,
            compile_only=compile_only,
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
    kernel = flat_kernel if config.flat else tiles_kernel
    kernel.run(
        *operands, weight, weight if bias is None else bias, out, workspace.partials, workspace.counters,
        m, n, k, x.stride(0), out.stride(0), lanes,
        BLOCK_M=config.block_m, BLOCK_N=config.block_n, BLOCK_K=config.block_k, HAS_BIAS=bias is not None,
        EVEN_K=k % config.block_k == 0, TMA=config.tma, PDL=config.pdl, PREFETCH=config.prefetch,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32", INTERPRETED=x.device.type == "cpu",
        num_warps=config.num_warps, num_stages=config.num_stages, launch_pdl=config.pdl,
        grid=(ceil_div(m, config.block_m), lanes), warmup=compile_only,
    )  # fmt: skip
