"""Addition to the residual stream and the normalisation that follows, in one pass."""

import triton
import triton.language as tl
from torch import Tensor

from .overlap import after_the_one_in_front

_THREAD_ELEMENTS = 8  # two 16-byte accesses of the stream, one of the 16-bit tensors
_MAX_WARPS = 16


@triton.jit
def _inverse_rms(x, eps: tl.constexpr, width: tl.constexpr):
    """1 / sqrt(mean(x^2) + eps) of a row that is zero beyond `width`."""
    return 1.0 / tl.sqrt(tl.sum(x * x, axis=0) / width + eps)


@triton.jit
def _add_norm_kernel(
    hidden,  # float32 [rows, width]
    delta,  # [rows, width] or None
    weight,  # float32 [width]
    post_weight,  # float32 [width] or None
    out,  # [rows, width]
    eps: tl.constexpr,
    width: tl.constexpr,
    block: tl.constexpr,
    pdl: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * width
    columns = tl.arange(0, block)
    inside = columns < width
    gain = tl.load(weight + columns, mask=inside, other=0.0)  # ahead of all barriers, which no load crosses
    if pdl:
        row += after_the_one_in_front()
    x = tl.load(hidden + row + columns, mask=inside, other=0.0)
    if delta is not None:
        d = tl.load(delta + row + columns, mask=inside, other=0.0).to(tl.float32)
        if post_weight is not None:
            post_gain = tl.load(post_weight + columns, mask=inside, other=0.0)
            d = d * _inverse_rms(d, eps, width) * post_gain
        x += d
        tl.store(hidden + row + columns, x, mask=inside)
    y = x * _inverse_rms(x, eps, width) * gain
    tl.store(out + row + columns, y.to(out.dtype.element_ty), mask=inside)


def add_norm(
    hidden: Tensor,  # float32 [rows, width] contiguous: the residual stream, added to
    delta: Tensor | None,  # [rows, width] contiguous: a sub-layer's output
    weight: Tensor,  # float32 [width]
    eps: float,
    out: Tensor,  # [rows, width] contiguous: written
    post_weight: Tensor | None = None,  # float32 [width]
    *,
    pdl: bool = False,
) -> None:
    """hidden += delta (or rms_norm(delta) * post_weight), then out = rms_norm(hidden) * weight, rounded once.

    Without `delta` only `out` is written. A row's result does not depend on the number of rows.
    `pdl`: may start while the kernel before it in the stream still runs, and lets the next one do so (programmatic
    dependent launch; Hopper and later). That kernel must not write the weights.
    Source: Zhang and Sennrich, Root Mean Square Layer Normalization (2019); the norm of a sub-layer's output: Gemma
    Team, Gemma 2 (2024).
    """
    rows, width = hidden.shape
    block = triton.next_power_of_2(width)
    warps = min(max(block // (32 * _THREAD_ELEMENTS), 1), _MAX_WARPS)
    _add_norm_kernel[(rows,)](
        hidden, delta, weight, post_weight, out, eps, width, block, pdl, num_warps=warps, launch_pdl=pdl
    )
