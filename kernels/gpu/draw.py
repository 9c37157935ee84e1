"""Drawing tokens on the GPU: the token of engine/sampler.py for the same logits, parameters and noise."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .blocks import BLOCK, NONE, load_logits, summarize
from .cut import cut
from .philox import gumbel

WARPS = 4
TOKEN_STREAM, BLOCK_STREAM = tl.constexpr(0), tl.constexpr(1)  # those of kernels/sampling.py


@dataclass(frozen=True, slots=True)
class DrawParams:
    """How to draw each row's token; arrays on the device, [rows] or longer."""

    temperature: Tensor  # float32; 0 is greedy
    top_k: Tensor  # int32; 0 keeps all
    top_p: Tensor  # float32 or float64, over 0; 1 keeps all
    min_p: Tensor  # float32 or float64; 0 keeps all
    seed: Tensor  # int64, the 64 bits of the seed
    sample: Tensor  # int32, sample index of the sequence
    position: Tensor  # int32, of the token to be drawn


class DrawScratch:
    """What passes between the sampler's kernels; made once, for a maximum of rows."""

    def __init__(self, max_rows: int, vocab: int, device: torch.device) -> None:
        shape = (max_rows, triton.cdiv(vocab, BLOCK))
        self.maxima = torch.empty(shape, dtype=torch.float32, device=device)
        self.sums = torch.empty(shape, dtype=torch.float32, device=device)
        self.active = torch.empty(shape, dtype=torch.int32, device=device)
        self.edges = torch.empty(max_rows, 2, dtype=torch.float32, device=device)
        self.lasts = torch.empty(max_rows, dtype=torch.int32, device=device)

    @property
    def nbytes(self) -> int:
        """Memory taken, in bytes."""
        return sum(x.nbytes for x in (self.maxima, self.sums, self.active, self.edges, self.lasts))


@triton.jit
def _first(chosen, ids, none):
    """The lowest of `ids` that is `chosen`; `none` if there is no such."""
    return tl.min(tl.where(chosen, ids, none), axis=0)


@triton.jit
def _draw_kernel(
    logits,
    out,
    maxima,
    sums,
    edges,
    lasts,
    temperatures,
    seeds,
    samples,
    positions,
    stride,
    vocab,
    blocks,
    RANDOM: tl.constexpr,
    MAX_BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    numbers = tl.arange(0, MAX_BLOCKS)
    highest = tl.load(maxima + row * blocks + numbers, mask=numbers < blocks, other=NONE)
    best = tl.max(highest, axis=0)
    inside = tl.arange(0, BLOCK)
    block = tl.minimum(_first(highest == best, numbers, MAX_BLOCKS), blocks - 1)
    tokens = block * BLOCK + inside
    values = load_logits(logits, tokens, tokens < vocab)
    chosen = _first((values == best) & (values > NONE), tokens, vocab)
    if RANDOM:
        temperature = tl.load(temperatures + row)
        if temperature > 0.0:
            seed = tl.load(seeds + row)
            sample = tl.load(samples + row)
            position = tl.load(positions + row)
            base = tl.where(best == NONE, 0.0, best)
            weights = tl.load(sums + row * blocks + numbers, mask=numbers < blocks, other=0.0).to(tl.float64)
            likely = weights > 0.0
            race = tl.log(tl.where(likely, weights, 1.0)) + (highest - base).to(tl.float64) / temperature
            race = tl.where(likely, race + gumbel(seed, sample, position, BLOCK_STREAM, numbers), NONE)
            block = tl.minimum(_first(likely & (race == tl.max(race, axis=0)), numbers, MAX_BLOCKS), blocks - 1)
            tokens = block * BLOCK + inside
            values = load_logits(logits, tokens, tokens < vocab)
            low = tl.load(edges + 2 * row)
            high = tl.load(edges + 2 * row + 1)
            kept = (values > NONE) & (values >= low) & ((values >= high) | (tokens <= tl.load(lasts + row)))
            race = tl.div_rn(values - base, temperature).to(tl.float64)
            race = tl.where(kept, race + gumbel(seed, sample, position, TOKEN_STREAM, tokens), NONE)
            chosen = _first(kept & (race == tl.max(race, axis=0)), tokens, vocab)
    tl.store(out + row, tl.where(chosen < vocab, chosen, -1).to(tl.int64))


def draw_greedy(logits: Tensor, out: Tensor, scratch: DrawScratch) -> None:
    """The token of the highest logit of each row, the lowest of equals; -1 where none is above -inf.

    `logits`: bf16, fp16 or fp32 [rows, vocab], contiguous rows, not changed; `out`: int64 [rows], written. NaN and
    +inf count as impossible: as the least finite number.
    """
    if logits.shape[0]:
        summarize(logits, scratch.maxima, scratch.sums, None, weights=False)
        _draw(logits, None, out, scratch)


def draw(logits: Tensor, params: DrawParams, out: Tensor, scratch: DrawScratch) -> None:
    """A token a row, by the row's own parameters and noise; what else is in the batch makes no difference.

    `logits`, `out`: as in `draw_greedy`; rows with temperature 0 get what that gives. Filters in order: top-k, top-p of
    what top-k kept, min-p. Sources: Holtzman et al. (2020), Nguyen et al. (2024), Maddison et al. (2014).
    """
    if not logits.shape[0]:
        return
    summarize(logits, scratch.maxima, scratch.sums, params.temperature, weights=True)
    cut(
        logits,
        params.temperature,
        params.top_k,
        params.top_p,
        params.min_p,
        maxima=scratch.maxima,
        sums=scratch.sums,
        active=scratch.active,
        edges=scratch.edges,
        lasts=scratch.lasts,
    )
    _draw(logits, params, out, scratch)


def _draw(logits: Tensor, params: DrawParams | None, out: Tensor, scratch: DrawScratch) -> None:
    rows, vocab = logits.shape
    blocks = triton.cdiv(vocab, BLOCK)
    _draw_kernel[(rows,)](
        logits,
        out,
        scratch.maxima,
        scratch.sums,
        scratch.edges,
        scratch.lasts,
        None if params is None else params.temperature,
        None if params is None else params.seed,
        None if params is None else params.sample,
        None if params is None else params.position,
        logits.stride(0),
        vocab,
        blocks,
        RANDOM=params is not None,
        MAX_BLOCKS=triton.next_power_of_2(blocks),
        BLOCK=BLOCK,
        num_warps=WARPS,
    )
