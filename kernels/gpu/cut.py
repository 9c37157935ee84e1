"""Where top-k, top-p and min-p cut a row of logits: thresholds, found without sorting.

One program a row, which looks at its parameters first, so that rows without a filter cost nothing. Whatever is cut off
lies below a threshold: the program searches it over the floats in order (four intervals a pass), counting tokens for
top-k and adding up their weights for top-p. The block maxima bound it from below, and only blocks that reach the bound
are read. Of equals at the threshold the lower token ids stay.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .blocks import BLOCK, NONE, finite_base, load_logits, steepness
from .threshold import (
    LOWEST,
    add_up,
    edge,
    least_likely,
    list_blocks,
    load_tile,
    lower_bound,
    ordered,
    search,
    weight_of,
)

TILE, UNROLL, WARPS = 32, 4, 32  # blocks that a program reads at once, and how often before it waits
_SHIFTS = {torch.float32: 0, torch.bfloat16: 16, torch.float16: 13}  # bits of a float32 that the type does not have


@triton.jit
def _weight(logits, active, count, vocab, best, steep, least, TILE: tl.constexpr, BLOCK: tl.constexpr):
    """Of all listed tokens from `least` on, float64."""
    total = tl.zeros((TILE, BLOCK), tl.float32)
    for start in range(0, count, TILE):
        values, _ = load_tile(logits, active, start, count, vocab, TILE, BLOCK)
        total += tl.where(values >= least, tl.exp2((values - best) * steep), 0.0)
    return add_up(total)


@triton.jit
def _tie(logits, active, count, vocab, low, high, wanted, TILE: tl.constexpr, BLOCK: tl.constexpr):
    """The id of the `wanted`-th token with low <= logit < high, in order of ids; `vocab` if there are fewer."""
    seen = tl.zeros((), tl.int32)
    block = vocab // BLOCK + 1
    left = wanted
    for start in range(0, count, TILE):
        values, tokens = load_tile(logits, active, start, count, vocab, TILE, BLOCK)
        equal = tl.sum(((values >= low) & (values < high)).to(tl.int32), axis=1)
        upto = seen + tl.cumsum(equal, axis=0)
        here = (upto >= wanted) & (upto - equal < wanted)
        found = tl.min(tl.where(here, tl.min(tokens, axis=1) // BLOCK, block), axis=0)
        left -= tl.sum(tl.where(here, upto - equal, 0), axis=0)
        block = tl.minimum(block, found)
        seen += tl.sum(equal, axis=0)
    tokens = block * BLOCK + tl.arange(0, BLOCK)
    values = load_logits(logits, tokens, tokens < vocab)
    equal = (values >= low) & (values < high)
    reached = equal & (tl.cumsum(equal.to(tl.int32), axis=0) == left)
    return tl.min(tl.where(reached, tokens, vocab), axis=0)


@triton.jit
def _resum(
    logits,
    active,
    count,
    vocab,
    maxima,
    sums,
    low,
    high,
    last,
    steep,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The listed blocks' sums, of what is kept."""
    for start in range(0, count, TILE):
        values, tokens = load_tile(logits, active, start, count, vocab, TILE, BLOCK)
        number = tl.min(tokens, axis=1) // BLOCK
        listed = start + tl.arange(0, TILE) < count
        highest = tl.load(maxima + number, mask=listed, other=0.0)
        kept = (values >= low) & ((values >= high) | (tokens <= last))
        powers = tl.where(kept, tl.exp2((values - highest[:, None]) * steep), 0.0)
        tl.store(sums + number, tl.sum(powers, axis=1), mask=listed)


@triton.jit
def _cut_kernel(
    logits,
    maxima,
    sums,
    active,
    edges,
    lasts,
    temperatures,
    top_ks,
    top_ps,
    min_ps,
    stride,
    vocab,
    blocks,
    SHIFT: tl.constexpr,
    MAX_BLOCKS: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    UNROLL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperatures + row)
    top_k = tl.load(top_ks + row)
    top_p = tl.load(top_ps + row).to(tl.float64)
    min_p = tl.load(min_ps + row).to(tl.float64)
    by_count = (top_k > 0) & (top_k < vocab)
    by_weight = top_p < 1.0
    none = tl.full((), NONE, tl.float32)
    low_edge = none
    high_edge = none
    last = vocab
    if (temperature > 0.0) & (by_count | by_weight | (min_p > 0.0)):
        logits += row * stride
        maxima += row * blocks
        sums += row * blocks
        active += row * blocks
        steep = steepness(temperature)
        numbers = tl.arange(0, MAX_BLOCKS)
        highest = tl.load(maxima + numbers, mask=numbers < blocks, other=NONE)
        best = finite_base(tl.max(highest, axis=0))
        low = tl.full((), LOWEST >> SHIFT, tl.int64)
        high = (ordered(best) >> SHIFT) + 1
        ties = tl.zeros((), tl.float64) + vocab
        total = ties
        over = total
        if by_count:
            target = top_k.to(tl.float64)
            low = lower_bound(highest, (highest > NONE).to(tl.float32), target, high, SHIFT)
            low, over = search(
                logits, active, highest, vocab, best, steep, target, low, high, False, SHIFT, TILE, BLOCK, UNROLL
            )
            ties = target - over
        if by_weight:
            weights = tl.exp2((highest - best) * steep)
            floor = low
            if by_count:
                count = list_blocks(active, highest, edge(low, SHIFT))
                over = _weight(logits, active, count, vocab, best, steep, edge(low + 1, SHIFT), TILE, BLOCK)
                total = over + ties * weight_of(low, best, steep, SHIFT)
            else:
                shares = tl.load(sums + numbers, mask=numbers < blocks, other=0.0) * weights
                total = tl.sum(shares.to(tl.float64), axis=0)
                low = tl.maximum(low, lower_bound(highest, weights, top_p * total, high, SHIFT))
                # Even if all tokens were as likely as this logit's, they would not make up what is cut off.
                spare = best + temperature * (tl.log((1.0 - top_p) * total / vocab).to(tl.float32) - 0.01)
                low = tl.maximum(low, ordered(spare) >> SHIFT)
            target = top_p * total
            low, over = search(
                logits, active, highest, vocab, best, steep, target, low, high, True, SHIFT, TILE, BLOCK, UNROLL
            )
            needed = tl.maximum(tl.ceil((target - over) / weight_of(low, best, steep, SHIFT)), 1.0)
            ties = tl.where(by_count & (low == floor), tl.minimum(ties, needed), needed)
        if by_count | by_weight:
            low_edge = edge(low, SHIFT)
            high_edge = edge(low + 1, SHIFT)
            if ties < vocab:
                count = list_blocks(active, highest, low_edge)
                last = _tie(logits, active, count, vocab, low_edge, high_edge, ties.to(tl.int32), TILE, BLOCK)
        if min_p > 0.0:
            low_edge = tl.maximum(low_edge, least_likely(best, temperature, tl.log(min_p).to(tl.float32)))
        count = list_blocks(active, highest, low_edge)
        tl.store(sums + numbers, tl.zeros((MAX_BLOCKS,), tl.float32), mask=(numbers < blocks) & (highest < low_edge))
        _resum(logits, active, count, vocab, maxima, sums, low_edge, high_edge, last, steep, TILE, BLOCK)
    tl.store(edges + 2 * row, low_edge)
    tl.store(edges + 2 * row + 1, high_edge)
    tl.store(lasts + row, last)


def cut(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    *,
    maxima: Tensor,
    sums: Tensor,
    active: Tensor,
    edges: Tensor,
    lasts: Tensor,
) -> None:
    """Which tokens of each row may be drawn: from `edges[row, 0]` on; below `edges[row, 1]` ids to `lasts[row]` only.

    `logits`: [rows, vocab]; `temperature`: float32 [rows]; `top_k`: int32 [rows], 0 for all; `top_p`, `min_p`: float32
    or float64 [rows], 1 and 0 for all; `maxima`, `sums`: of `blocks.summarize`, the sums become those of what is kept;
    `active`: int32, as many; `edges`: float32 [rows, 2], `lasts`: int32 [rows], written. Top-p is a share of what top-k
    keeps; of equal logits the lower token ids rank higher. Rows with temperature 0 are left alone.
    """
    rows, vocab = logits.shape
    blocks = triton.cdiv(vocab, BLOCK)
    _cut_kernel[(rows,)](
        logits,
        maxima,
        sums,
        active,
        edges,
        lasts,
        temperature,
        top_k,
        top_p,
        min_p,
        logits.stride(0),
        vocab,
        blocks,
        SHIFT=_SHIFTS[logits.dtype],
        MAX_BLOCKS=triton.next_power_of_2(blocks),
        TILE=min(TILE, triton.next_power_of_2(blocks)),
        BLOCK=BLOCK,
        UNROLL=min(UNROLL, triton.cdiv(blocks, TILE)),
        num_warps=WARPS,
    )
