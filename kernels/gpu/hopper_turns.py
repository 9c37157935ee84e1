"""The main loop of attention on Hopper GPUs, where each warpgroup goes its own way (FlashAttention-3, Shah 2024).

A warpgroup's softmax runs under the other's products, and under its own of the block before. Scores and weights keep
their registers, and sums stay apart by thread until the end.
"""

import math
from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .hopper_copies import FLAT

LOG2E = gl.constexpr(math.log2(math.e))
PARTS = gl.constexpr(2)  # warpgroups that compute
barrier: Any = getattr(gl, "barrier", None) or gl.thread_barrier  # its name before Triton 3.7


@gluon.jit
def spread(x):
    """[rows, block] as [rows, block / 8, 4, 2]: of these a thread holds the second and the last, a quad the third."""
    return x.reshape([x.shape[0], x.shape[1] // 8, 4, 2])


@gluon.jit
def await_turn(order, turn, part: gl.constexpr):
    """Waits until the part before has started its products: those of turn `turn`, or for the first part of turn - 1."""
    mbarrier.wait(order.index(part), (turn + 1 if part == 0 else turn) & 1)


@gluon.jit
def weigh(
    scores,  # float32 [rows, block]: products
    total,  # float32 [rows, 4, 2]: sums of the weights so far
    top,  # float32 [rows]: greatest score so far, times log2(e)
    positions,  # int32 [rows]
    begin,  # position of the first key
    masked: gl.constexpr,
    factor: gl.constexpr,
    cap: gl.constexpr,
    window: gl.constexpr,
):
    """The block's weights, by how much to scale what was summed before, and the new `total` and `top`."""
    layout: gl.constexpr = scores.type.layout
    if cap > 0:  # tanh(scores * scale / cap); cap itself is in the sharpness
        scores = 1.0 - 2.0 / (gl.exp2(scores * (factor * 2.0 / cap)) + 1.0)
    if masked:
        keys = begin + gl.arange(0, scores.shape[1], layout=gl.SliceLayout(0, layout))
        seen = keys[None, :] <= positions[:, None]
        if window > 0:
            seen = seen & (keys[None, :] > positions[:, None] - window)
        scores = gl.where(seen, scores, float("-inf"))
    sharpness: gl.constexpr = cap * LOG2E if cap > 0 else factor
    greatest = gl.max(gl.max(gl.max(spread(scores), 1), 2), 1)
    greatest = gl.convert_layout(greatest, gl.SliceLayout(1, layout), assert_trivial=True)
    new_top = gl.maximum(top, greatest * sharpness)
    base = new_top
    if masked and window > 0:  # nothing seen yet: avoid inf - inf
        base = gl.where(new_top == float("-inf"), 0.0, new_top)
    weights = gl.exp2(scores * sharpness - base[:, None])
    decay = gl.exp2(top - base)
    added = gl.sum(spread(weights), 1)
    apart = gl.convert_layout(decay, gl.SliceLayout(1, gl.SliceLayout(2, added.type.layout)), assert_trivial=True)
    return weights, decay, total * apart.expand_dims(1).expand_dims(2) + added, new_top


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
    shares,  # float32 [rows, block]: weights of block first - 1
    weights,  # the same as an operand
    total,
    top,
    positions,
    queries,  # shared [rows, width]
    k_tiles,
    v_tiles,
    ready,
    free,
    order,
    use,  # number of block 0's copies
    turn,  # number of block 0's turn
    origin,  # position of block 0
    first,  # blocks first .. until - 1: their scores and weights, and the products of those before them
    until,
    masked: gl.constexpr,
    factor: gl.constexpr,
    cap: gl.constexpr,
    window: gl.constexpr,
    stages: gl.constexpr,
    acc_layout: gl.constexpr,
    part: gl.constexpr,
):
    width: gl.constexpr = queries.shape[1]
    block: gl.constexpr = weights.shape[1]
    k_blocks = k_tiles._reinterpret(queries.dtype, [stages, block, width], FLAT)
    v_blocks = v_tiles._reinterpret(queries.dtype, [stages, block, width], FLAT)
    for j in range(first, until):
        stage = (use + j) % stages
        k, v = k_blocks.index(stage).permute((1, 0)), v_blocks.index(stage)
        await_turn(order, turn + j, part)
        scores = hopper.warpgroup_mma(queries, k, shares, use_acc=False, is_async=True)
        acc = hopper.warpgroup_mma(weights, v, acc, is_async=True)
        barrier()  # all warps are done with K of block j - 1 and V of block j - 2, and have started these
        mbarrier.arrive(order.index((part + 1) % PARTS))
        mbarrier.arrive(free.index((use + j - 1) % stages))
        scores = hopper.warpgroup_mma_wait(1, deps=[scores])
        shares, decay, total, top = weigh(
            scores, total, top, positions, origin + j * block, masked, factor, cap, window
        )
        # This wait is a branch, and keeps the assembler from moving the next one up, before the weights.
        mbarrier.wait(ready.index((use + j + 1) % stages), ((use + j + 1) // stages) & 1)
        acc = hopper.warpgroup_mma_wait(0, deps=[acc])
        acc = acc * gl.convert_layout(decay, gl.SliceLayout(1, acc_layout))[:, None]
        weights = as_operand(shares, queries.dtype, acc_layout)
    return acc, shares, weights, total, top
