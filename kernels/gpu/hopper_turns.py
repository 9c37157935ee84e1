"""The main loop of attention on Hopper GPUs: softmax in the shadow of the matrix units (FlashAttention-3, Shah 2024).

While the scores of block j become weights, the weights of block j - 1 times V are still being computed.
"""

import math
from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .hopper_copies import FLAT

LOG2E = gl.constexpr(math.log2(math.e))
barrier: Any = getattr(gl, "barrier", None) or gl.thread_barrier  # its name before Triton 3.7


@gluon.jit
def weigh(
    scores,  # float32 [rows, block]: products
    total,  # float32 [rows]: sums of the weights so far
    top,  # float32 [rows]: greatest score so far, times log2(e)
    positions,  # int32 [rows]
    begin,  # position of the first key
    masked: gl.constexpr,
    factor: gl.constexpr,
    cap: gl.constexpr,
    window: gl.constexpr,
):
    """The block's weights, by how much to scale what was summed before, and the new `total` and `top`."""
    if cap > 0:  # tanh(scores * scale / cap); cap itself is in the sharpness
        scores = 1.0 - 2.0 / (gl.exp2(scores * (factor * 2.0 / cap)) + 1.0)
    if masked:
        keys = begin + gl.arange(0, scores.shape[1], layout=gl.SliceLayout(0, scores.type.layout))
        seen = keys[None, :] <= positions[:, None]
        if window > 0:
            seen = seen & (keys[None, :] > positions[:, None] - window)
        scores = gl.where(seen, scores, float("-inf"))
    sharpness: gl.constexpr = cap * LOG2E if cap > 0 else factor
    new_top = gl.maximum(top, gl.max(scores, 1) * sharpness)
    base = new_top
    if masked and window > 0:  # nothing seen yet: avoid inf - inf
        base = gl.where(new_top == float("-inf"), 0.0, new_top)
    weights = gl.exp2(scores * sharpness - base[:, None])
    decay = gl.exp2(top - base)
    return weights, decay, total * decay + gl.sum(weights, 1), new_top


@gluon.jit
def as_operand(shares, dtype: gl.constexpr, acc_layout: gl.constexpr):
    """Weights [rows, block] as the products with V take them.

    The move does nothing, but hinders the compiler from carrying them into the next turn unpacked, in twice the
    registers, and from packing them while the operand before is in use.
    """
    packed = shares.to(dtype)
    packed = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [packed], packed.dtype, is_pure=False, pack=2)
    return gl.convert_layout(packed, gl.DotOperandLayout(0, acc_layout, 2))


@gluon.jit
def take_turns(
    acc,  # float32 [rows, width], scaled as the weights are
    weights,  # [rows, block] of block first - 1, as an operand
    total,
    top,
    positions,
    queries,  # shared [rows, width]
    k_tiles,
    v_tiles,
    ready,
    free,
    open_gate,  # a barrier in its first phase: to wait for the one before is no wait
    origin,  # position of block 0
    first,  # blocks first .. until - 1: their scores and weights, and the products of those before them
    until,
    masked: gl.constexpr,
    factor: gl.constexpr,
    cap: gl.constexpr,
    window: gl.constexpr,
    stages: gl.constexpr,
    score_layout: gl.constexpr,
    acc_layout: gl.constexpr,
):
    rows: gl.constexpr = queries.shape[0]
    width: gl.constexpr = queries.shape[1]
    block: gl.constexpr = weights.shape[1]
    k_blocks = k_tiles._reinterpret(queries.dtype, [stages, block, width], FLAT)
    v_blocks = v_tiles._reinterpret(queries.dtype, [stages, block, width], FLAT)
    for j in range(first, until):
        stage = j % stages
        zeros = gl.zeros([rows, block], gl.float32, score_layout)
        k, v = k_blocks.index(stage).permute((1, 0)), v_blocks.index(stage)
        scores = hopper.warpgroup_mma(queries, k, zeros, use_acc=False, is_async=True)
        acc = hopper.warpgroup_mma(weights, v, acc, is_async=True)
        barrier()  # all warps are done with K of block j - 1 and V of block j - 2
        mbarrier.arrive(free.index((j - 1) % stages))
        # The compiler lets all warps meet between an arrival and what follows. Here they have just met; at the next
        # wait it would cost the overlap of the one half's weights with the other half's products.
        mbarrier.wait(open_gate, 1)
        scores = hopper.warpgroup_mma_wait(1, deps=[scores])
        shares, decay, total, top = weigh(
            scores, total, top, positions, origin + j * block, masked, factor, cap, window
        )
        # This wait is a branch, and keeps the assembler from moving the next one up, before the weights.
        mbarrier.wait(ready.index((j + 1) % stages), ((j + 1) // stages) & 1)
        acc = hopper.warpgroup_mma_wait(0, deps=[acc])
        acc = acc * gl.convert_layout(decay, gl.SliceLayout(1, acc_layout))[:, None]
        weights = as_operand(shares, queries.dtype, acc_layout)
    return acc, weights, total, top
