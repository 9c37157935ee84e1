"""One pass over logits: what the sampler needs to know of each block of BLOCK tokens."""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 256  # tokens; that of kernels/sampling.py
TILE, WARPS = 16, 4  # blocks of one program, and its warps
PART = 64  # tokens that eight threads load at once
NONE = tl.constexpr(float("-inf"))
LEAST = tl.constexpr(torch.finfo(torch.float32).min)
LOG2E = tl.constexpr(1.4426950408889634)
STEEPEST = tl.constexpr(3.0e38)  # 0 times it is 0


@triton.jit
def possible(logits):
    """NaN and +inf become the least finite number, as in engine/sampler.py; -inf stays. Returns float32."""
    logits = logits.to(tl.float32)
    return tl.where(logits < float("inf"), logits, LEAST)


@triton.jit
def load_logits(row, tokens, mask):
    """`row`: pointer to its first logit; what `mask` leaves out is -inf. Returns float32 like `tokens`."""
    return possible(tl.load(row + tokens, mask=mask, other=NONE))


@triton.jit
def steepness(temperature):
    """Factor of a difference of logits in exp2: log2(e) / temperature; never infinite, for 0 times that is NaN."""
    return tl.minimum(1.0 / temperature * LOG2E, STEEPEST)


@triton.jit
def finite_base(highest):
    """What to subtract before exp2: of a block of -inf alone nothing, so that no -inf - -inf arises."""
    return tl.where(highest == NONE, 0.0, highest)


@triton.jit
def _summarize_kernel(
    logits,
    maxima,
    sums,
    temperature,
    stride,
    vocab,
    blocks,
    tiles,
    SUMS: tl.constexpr,  # 0: maxima only; 1: sums where temperature > 0; 2: sums at temperature 1
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    PART: tl.constexpr,
):
    row = (tl.program_id(0) // tiles).to(tl.int64)
    numbers = tl.program_id(0) % tiles * TILE + tl.arange(0, TILE)
    # Parts come first, so that a thread holds all parts of a few columns: then eight threads share a block, not a warp.
    parts = tl.arange(0, BLOCK // PART)[:, None, None] * PART + tl.arange(0, PART)[None, None, :]
    tokens = numbers[None, :, None] * BLOCK + parts
    values = load_logits(logits + row * stride, tokens, tokens < vocab)
    highest = tl.max(tl.max(values, axis=0), axis=1)
    at = row * blocks + numbers
    tl.store(maxima + at, highest, mask=numbers < blocks)
    if SUMS > 0:
        heat = 1.0
        if SUMS == 1:
            heat = tl.load(temperature + row)
        if heat > 0.0:
            powers = tl.exp2((values - finite_base(highest)[None, :, None]) * steepness(heat))
            tl.store(sums + at, tl.sum(tl.sum(powers, axis=0), axis=1), mask=numbers < blocks)


def summarize(logits: Tensor, maxima: Tensor, sums: Tensor, temperature: Tensor | None, *, weights: bool) -> None:
    """The highest logit of each block, and the sum of exp((logit - that) / temperature) over it.

    `logits`: bf16, fp16 or fp32 [rows, vocab], contiguous rows; `maxima`, `sums`: float32, of which the first
    rows * ceil(vocab / BLOCK) elements are written. Sums are taken if `weights`: at `temperature`, float32 [rows],
    where it is over 0, or without one at 1. NaN and +inf count as the least finite number.
    """
    rows, vocab = logits.shape
    blocks = triton.cdiv(vocab, BLOCK)
    tiles = triton.cdiv(blocks, TILE)
    mode = 0 if not weights else 2 if temperature is None else 1
    _summarize_kernel[(rows * tiles,)](
        logits,
        maxima,
        sums,
        maxima if temperature is None else temperature,
        logits.stride(0),
        vocab,
        blocks,
        tiles,
        SUMS=mode,
        TILE=TILE,
        BLOCK=BLOCK,
        PART=PART,
        num_warps=WARPS,
    )
