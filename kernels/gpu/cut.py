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

TILE, UNROLL, WARPS = 32, 4, 32  # blocks that a program reads at once, and how often before it waits
LOWEST = tl.constexpr(-2139095041)  # the rank of -inf
_SHIFTS = {torch.float32: 0, torch.bfloat16: 16, torch.float16: 13}  # bits of a float32 that the type does not have


@triton.jit
def ordered(value):
    """A float32's rank among all floats, int64; that of -0 is that of 0."""
    bits = tl.where(value == 0.0, 0.0, value).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def unordered(rank):
    """The float32 of a rank."""
    bits = rank.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _edge(rank, SHIFT: tl.constexpr):
    """The least float32 of a step of 2^SHIFT ranks; of the lowest step -inf, under which there are only NaNs."""
    return unordered(tl.maximum(rank << SHIFT, LOWEST))


@triton.jit
def _lower_bound(values, weights, target, high, SHIFT: tl.constexpr):
    """The highest rank, in steps of 2^SHIFT, from which on the `values` weigh `target`; that of -inf if none does.

    `values`, `weights`: float32 [n]; `high`: above them all.
    """
    low = tl.full((), LOWEST >> SHIFT, tl.int64)
    while high - low > 1:
        middle = (low + high) // 2
        reached = tl.sum(tl.where(values >= _edge(middle, SHIFT), weights, 0.0), axis=0) >= target
        low = tl.where(reached, middle, low)
        high = tl.where(reached, high, middle)
    return low


@triton.jit
def _activate(active, highest, numbers, least):
    """Lists the blocks that hold a logit of at least `least`, in order. Returns how many there are."""
    reached = (highest >= least) & (highest > NONE)
    tl.debug_barrier()  # the list may still be read
    tl.store(active + tl.cumsum(reached.to(tl.int32), axis=0) - 1, numbers, mask=reached)
    tl.debug_barrier()
    return tl.sum(reached.to(tl.int32), axis=0)


@triton.jit
def _load_tile(logits, active, first, count, vocab, TILE: tl.constexpr, BLOCK: tl.constexpr):
    """Blocks `first`.. of the list: (their logits, -inf beyond the end; token ids), both [TILE, BLOCK]."""
    at = first + tl.arange(0, TILE)
    number = tl.load(active + at, mask=at < count, other=0)
    tokens = number[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    return load_logits(logits, tokens, (at < count)[:, None] & (tokens < vocab)), tokens


@triton.jit
def _total(values):
    """The sum of a [TILE, BLOCK] tile, float64."""
    return tl.sum(tl.sum(values.to(tl.float64), axis=1), axis=0)


@triton.jit
def _weight_of(rank, best, steep, SHIFT: tl.constexpr):
    """The weight of the one logit in a step of 2^SHIFT ranks, float64; at most 1."""
    filled = tl.where(rank < 0, (1 << SHIFT) - 1, 0)  # what a negative number's rank ends in
    return tl.minimum(tl.exp2((unordered((rank << SHIFT) | filled) - best) * steep), 1.0).to(tl.float64)


@triton.jit
def _pivots(low, high, by_value, SHIFT: tl.constexpr):
    """Three ranks that part [low, high), evenly by value or by rank; `high` may be among them."""
    lower = _edge(low, SHIFT)
    upper = _edge(high, SHIFT)
    first = tl.where(by_value, ordered(0.75 * lower + 0.25 * upper) >> SHIFT, low + (high - low) // 4)
    second = tl.where(by_value, ordered(0.5 * lower + 0.5 * upper) >> SHIFT, low + (high - low) // 2)
    third = tl.where(by_value, ordered(0.25 * lower + 0.75 * upper) >> SHIFT, high - (high - low) // 4)
    first = tl.minimum(tl.maximum(first, low + 1), high)
    second = tl.minimum(tl.maximum(second, first), high)
    return first, second, tl.minimum(tl.maximum(third, second), high)


@triton.jit
def _search(
    logits,
    active,
    count,
    vocab,
    best,
    steep,
    target,
    low,
    high,
    WEIGHTS: tl.constexpr,
    SHIFT: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """The highest rank, in steps of 2^SHIFT, from which on the listed blocks' tokens (or weights) make up `target`.

    It lies in [low, high), ranks shifted. Returns (rank, shifted; what lies over that step, float64).
    """
    over = tl.zeros((), tl.float64)
    # By value is quick where logits lie, by rank is sure to end; each in turn.
    by_value = _edge(low, SHIFT) > NONE
    while high - low > 1:
        first, second, third = _pivots(low, high, by_value, SHIFT)
        by_value = not by_value
        least1 = _edge(first, SHIFT)
        least2 = _edge(second, SHIFT)
        least3 = _edge(third, SHIFT)
        sum1 = tl.zeros((TILE, BLOCK), tl.float32)
        sum2 = tl.zeros((TILE, BLOCK), tl.float32)
        sum3 = tl.zeros((TILE, BLOCK), tl.float32)
        for start in range(0, count, TILE * UNROLL):
            for part in tl.static_range(UNROLL):
                values, _ = _load_tile(logits, active, start + part * TILE, count, vocab, TILE, BLOCK)
                weights = tl.exp2((values - best) * steep) if WEIGHTS else tl.full((TILE, BLOCK), 1.0, tl.float32)
                sum1 += tl.where(values >= least1, weights, 0.0)
                sum2 += tl.where(values >= least2, weights, 0.0)
                sum3 += tl.where(values >= least3, weights, 0.0)
        from1 = _total(sum1)
        from2 = _total(sum2)
        from3 = _total(sum3)
        if from3 >= target:
            low = third
        elif from2 >= target:
            low = second
            high = third
            over = from3
        elif from1 >= target:
            low = first
            high = second
            over = from2
        else:
            high = first
            over = from1
    return low, over


@triton.jit
def _weight(logits, active, count, vocab, best, steep, least, TILE: tl.constexpr, BLOCK: tl.constexpr):
    """Of all listed tokens from `least` on, float64."""
    total = tl.zeros((TILE, BLOCK), tl.float32)
    for start in range(0, count, TILE):
        values, _ = _load_tile(logits, active, start, count, vocab, TILE, BLOCK)
        total += tl.where(values >= least, tl.exp2((values - best) * steep), 0.0)
    return _total(total)


@triton.jit
def _tie(logits, active, count, vocab, low, high, wanted, TILE: tl.constexpr, BLOCK: tl.constexpr):
    """The id of the `wanted`-th token with low <= logit < high, in order of ids; `vocab` if there are fewer."""
    seen = tl.zeros((), tl.int32)
    block = vocab // BLOCK + 1
    left = wanted
    for start in range(0, count, TILE):
        values, tokens = _load_tile(logits, active, start, count, vocab, TILE, BLOCK)
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
def _least_likely(best, temperature, least):
    """The lowest logit whose distance from the best, over the temperature, is at least `least` (log of min-p)."""
    low = tl.full((), LOWEST, tl.int64)
    high = ordered(best)
    while high - low > 1:
        middle = (low + high) // 2
        enough = tl.div_rn(unordered(middle) - best, temperature) >= least
        high = tl.where(enough, middle, high)
        low = tl.where(enough, low, middle)
    return unordered(high)


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
        values, tokens = _load_tile(logits, active, start, count, vocab, TILE, BLOCK)
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
        if by_count:
            target = top_k.to(tl.float64)
            low = _lower_bound(highest, tl.where(highest > NONE, 1.0, 0.0), target, high, SHIFT)
            count = _activate(active, highest, numbers, _edge(low, SHIFT))
            low, over = _search(
                logits, active, count, vocab, best, steep, target, low, high, False, SHIFT, TILE, BLOCK, UNROLL
            )
            ties = target - over
        if by_weight:
            weights = tl.exp2((highest - best) * steep)
            floor = low
            if by_count:
                count = _activate(active, highest, numbers, _edge(low, SHIFT))
                over = _weight(logits, active, count, vocab, best, steep, _edge(low + 1, SHIFT), TILE, BLOCK)
                total = over + ties * _weight_of(low, best, steep, SHIFT)
            else:
                shares = tl.load(sums + numbers, mask=numbers < blocks, other=0.0) * weights
                total = tl.sum(shares.to(tl.float64), axis=0)
                low = tl.maximum(low, _lower_bound(highest, weights, top_p * total, high, SHIFT))
                # Even if all tokens were as likely as this logit's, they would not make up what is cut off.
                spare = best + temperature * (tl.log((1.0 - top_p) * total / vocab).to(tl.float32) - 0.01)
                low = tl.maximum(low, ordered(spare) >> SHIFT)
                count = _activate(active, highest, numbers, _edge(low, SHIFT))
            target = top_p * total
            low, over = _search(
                logits, active, count, vocab, best, steep, target, low, high, True, SHIFT, TILE, BLOCK, UNROLL
            )
            needed = tl.maximum(tl.ceil((target - over) / _weight_of(low, best, steep, SHIFT)), 1.0)
            ties = tl.where(by_count & (low == floor), tl.minimum(ties, needed), needed)
        if by_count | by_weight:
            low_edge = _edge(low, SHIFT)
            high_edge = _edge(low + 1, SHIFT)
            if ties < vocab:
                count = _activate(active, highest, numbers, low_edge)
                last = _tie(logits, active, count, vocab, low_edge, high_edge, ties.to(tl.int32), TILE, BLOCK)
        if min_p > 0.0:
            low_edge = tl.maximum(low_edge, _least_likely(best, temperature, tl.log(min_p).to(tl.float32)))
        count = _activate(active, highest, numbers, low_edge)
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
