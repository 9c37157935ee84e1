"""The gates of gated feed-forward layers, and the soft cap."""

from typing import Literal

import triton
import triton.language as tl
from torch import Tensor

from .overlap import after_the_one_in_front

_BLOCK = 2048
_WARPS = 4  # 16 elements a thread: two 16-byte loads of the gate and two of the other half in flight


@triton.jit
def _gated_kernel(
    gate_up,  # [rows, 2 * inner]
    out,  # [rows, inner]
    inner: tl.constexpr,
    gelu: tl.constexpr,
    block: tl.constexpr,
    pdl: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * block + tl.arange(0, block)
    inside = columns < inner
    source = gate_up + row * (2 * inner) + columns
    if pdl:
        source += after_the_one_in_front()
    gate = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(source + inner, mask=inside, other=0.0).to(tl.float32)
    if gelu:  # (1 + tanh(z)) / 2 = sigmoid(2 z), with no cancellation
        gate *= tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    else:
        gate *= tl.sigmoid(gate)
    tl.store(out + row * inner + columns, (gate * up).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _soft_cap_kernel(
    logits,  # [rows, vocab]
    cap: tl.constexpr,
    vocab: tl.constexpr,
    block: tl.constexpr,
):
    columns = tl.program_id(1) * block + tl.arange(0, block)
    inside = columns < vocab
    place = logits + tl.program_id(0).to(tl.int64) * vocab + columns
    x = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    y = cap * (2.0 * tl.sigmoid(x * (2.0 / cap)) - 1.0)
    tl.store(place, y.to(logits.dtype.element_ty), mask=inside)


def gated(
    gate_up: Tensor,  # [rows, 2 * inner] contiguous, gate in the first half
    out: Tensor,  # [rows, inner] contiguous: written
    activation: Literal["silu", "gelu_tanh"],
    *,
    pdl: bool = False,
) -> None:
    """out = activation(gate) * up, in float32, rounded once; gelu by its tanh approximation.

    `pdl`: may start while the kernel before it in the stream still runs, and lets the next one do so (programmatic
    dependent launch; Hopper and later).
    Source: Shazeer, GLU Variants Improve Transformer (2020).
    """
    rows, inner = out.shape
    block = min(_BLOCK, triton.next_power_of_2(inner))
    grid = (rows, triton.cdiv(inner, block))
    _gated_kernel[grid](gate_up, out, inner, activation == "gelu_tanh", block, pdl, num_warps=_WARPS, launch_pdl=pdl)


def soft_cap_(logits: Tensor, cap: float) -> None:
    """logits = cap * tanh(logits / cap), in float32, rounded once, to within cap * 2e-7.

    `logits`: [rows, vocab] contiguous; `cap`: above 0. Source: Gemma Team, Gemma 2 (2024).
    """
    rows, vocab = logits.shape
    grid = (rows, triton.cdiv(vocab, _BLOCK))
    _soft_cap_kernel[grid](logits, cap, vocab, _BLOCK, num_warps=_WARPS)
