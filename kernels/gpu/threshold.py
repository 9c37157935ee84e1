"""Thresholds among a row's logits: the floats in order, and searches over them.

A threshold is the rank of a float32 among all floats, in steps of 2^SHIFT where the logits' type has that many bits
less; searches go over the tokens of listed blocks only.
"""

import triton
import triton.language as tl

from .blocks import NONE, load_logits

LOWEST = tl.constexpr(-2139095041)  # the rank of -inf


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
def edge(rank, SHIFT: tl.constexpr):
    """The least float32 of a step of 2^SHIFT ranks; of the lowest step -inf, under which there are only NaNs."""
    return unordered(tl.maximum(rank << SHIFT, LOWEST))


@triton.jit
def weight_of(rank, best, steep, SHIFT: tl.constexpr):
    """The weight of the one logit in a step of 2^SHIFT ranks, float64; at most 1."""
    filled = tl.where(rank < 0, (1 << SHIFT) - 1, 0)  # what a negative number's rank ends in
    return tl.minimum(tl.exp2((unordered((rank << SHIFT) | filled) - best) * steep), 1.0).to(tl.float64)


@triton.jit
def least_likely(best, temperature, least):
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
def lower_bound(values, weights, target, high, SHIFT: tl.constexpr):
    """The highest rank, in steps of 2^SHIFT, from which on the `values` weigh `target`; that of -inf if none does.

    `values`, `weights`: float32 [n]; `high`: above them all.
    """
    low = tl.full((), LOWEST >> SHIFT, tl.int64)
    while high - low > 1:
        middle = (low + high) // 2
        reached = tl.sum(tl.where(values >= edge(middle, SHIFT), weights, 0.0), axis=0) >= target
        low = tl.where(reached, middle, low)
        high = tl.where(reached, high, middle)
    return low


@triton.jit
def list_blocks(active, highest, least):
    """Lists the blocks that hold a logit of at least `least`, in order. Returns how many there are.

    `highest`: float32 [n], of each block; those of -inf alone are left out.
    """
    chosen = (highest >= least) & (highest > NONE)
    place = tl.cumsum(chosen.to(tl.int32), axis=0) - 1
    tl.debug_barrier()  # the list may still be read
    tl.store(active + place, tl.arange(0, highest.shape[0]), mask=chosen)
    tl.debug_barrier()
    return tl.sum(chosen.to(tl.int32), axis=0)


@triton.jit
def load_tile(logits, active, first, count, vocab, TILE: tl.constexpr, BLOCK: tl.constexpr):
    """Blocks `first`.. of the list: (their logits, -inf beyond the end; token ids), both [TILE, BLOCK]."""
    at = first + tl.arange(0, TILE)
    number = tl.load(active + at, mask=at < count, other=0)
    tokens = number[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    return load_logits(logits, tokens, (at < count)[:, None] & (tokens < vocab)), tokens


@triton.jit
def add_up(values):
    """The sum of a [TILE, BLOCK] tile, float64."""
    return tl.sum(tl.sum(values.to(tl.float64), axis=1), axis=0)


@triton.jit
def _pivots(low, high, by_value, SHIFT: tl.constexpr):
    """Three ranks that part [low, high), evenly by value or by rank; `high` may be among them."""
    lower = edge(low, SHIFT)
    upper = edge(high, SHIFT)
    first = tl.where(by_value, ordered(0.75 * lower + 0.25 * upper) >> SHIFT, low + (high - low) // 4)
    second = tl.where(by_value, ordered(0.5 * lower + 0.5 * upper) >> SHIFT, low + (high - low) // 2)
    third = tl.where(by_value, ordered(0.25 * lower + 0.75 * upper) >> SHIFT, high - (high - low) // 4)
    first = tl.minimum(tl.maximum(first, low + 1), high)
    second = tl.minimum(tl.maximum(second, first), high)
    return first, second, tl.minimum(tl.maximum(third, second), high)


@triton.jit
def search(
    logits,
    active,
    highest,
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
    """The highest rank, in steps of 2^SHIFT, from which on the tokens (or their weights) make up `target`.

    It lies in [low, high), ranks shifted; each pass reads only blocks that reach `low`. `highest`: float32 [n], of each
    block; `active`: room for a list of them. Returns (rank, shifted; what lies over that step, float64).
    """
    over = tl.zeros((), tl.float64)
    # By value is quick where logits lie, by rank is sure to end; each in turn.
    by_value = edge(low, SHIFT) > NONE
    while high - low > 1:
        first, second, third = _pivots(low, high, by_value, SHIFT)
        by_value = not by_value
        count = list_blocks(active, highest, edge(low, SHIFT))
        least1 = edge(first, SHIFT)
        least2 = edge(second, SHIFT)
        least3 = edge(third, SHIFT)
        sum1 = tl.zeros((TILE, BLOCK), tl.float32)
        sum2 = tl.zeros((TILE, BLOCK), tl.float32)
        sum3 = tl.zeros((TILE, BLOCK), tl.float32)
        for start in range(0, count, TILE * UNROLL):
            for part in tl.static_range(UNROLL):
                values, _ = load_tile(logits, active, start + part * TILE, count, vocab, TILE, BLOCK)
                weights = tl.exp2((values - best) * steep) if WEIGHTS else tl.full((TILE, BLOCK), 1.0, tl.float32)
                sum1 += tl.where(values >= least1, weights, 0.0)
                sum2 += tl.where(values >= least2, weights, 0.0)
                sum3 += tl.where(values >= least3, weights, 0.0)
        from1 = add_up(sum1)
        from2 = add_up(sum2)
        from3 = add_up(sum3)
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
