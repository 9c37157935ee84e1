"""Log-probabilities of drawn tokens and of the likeliest ones, without sorting the vocabulary."""

import triton
import triton.language as tl
from torch import Tensor

from .blocks import BLOCK, NONE, finite_base, load_logits, summarize
from .draw import DrawScratch


@triton.jit(do_not_specialize=["value_stride", "id_stride", "top"])
def _logprobs_kernel(
    logits,
    tokens,
    values,
    ids,
    maxima,
    sums,
    stride,
    value_stride,
    id_stride,
    vocab,
    blocks,
    top,
    MAX_BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The next likeliest token lies in the block with the highest logit that was not taken yet; equals go by id."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    values += row * value_stride
    ids += row * id_stride
    numbers = tl.arange(0, MAX_BLOCKS)
    highest = tl.load(maxima + row * blocks + numbers, mask=numbers < blocks, other=NONE)
    base = finite_base(tl.max(highest, axis=0))
    weights = tl.load(sums + row * blocks + numbers, mask=numbers < blocks, other=0.0).to(tl.float64)
    total = tl.sum(weights * tl.exp((highest - base).to(tl.float64)), axis=0)
    log_total = tl.log(tl.where(total > 0.0, total, 1.0)).to(tl.float32)
    chosen = tl.load(tokens + row)
    own = load_logits(logits, chosen, (chosen >= 0) & (chosen < vocab))
    tl.store(values, own - base - log_total)
    tl.store(ids, chosen)
    value = tl.full((), float("inf"), tl.float32)
    token = tl.full((), -1, tl.int32)
    inside = tl.arange(0, BLOCK)
    for i in range(1, top + 1):
        block = tl.min(tl.where(highest == tl.max(highest, axis=0), numbers, blocks - 1), axis=0)
        at = block * BLOCK + inside
        here = load_logits(logits, at, at < vocab)
        left = tl.where((here < value) | ((here == value) & (at > token)), here, NONE)
        value = tl.max(left, axis=0)
        token = tl.min(tl.where((left == value) & (left > NONE), at, vocab), axis=0)
        highest = tl.where(numbers == block, tl.max(tl.where(at == token, NONE, left), axis=0), highest)
        tl.store(values + i, value - base - log_total)
        tl.store(ids + i, tl.where(token < vocab, token, -1).to(tl.int64))


def logprobs(logits: Tensor, tokens: Tensor, top: int, values: Tensor, ids: Tensor, scratch: DrawScratch) -> None:
    """Natural log-probabilities under the logits as they are: of each row's own token, then of its `top` likeliest.

    `logits`: bf16, fp16 or fp32 [rows, vocab], contiguous rows; `tokens`: int64 [rows], -1 for none; `values`: float32
    and `ids`: int64 [rows, 1 + top], contiguous rows, written. Of equals the lower token ids come first. Where there is
    no token, or none above -inf is left: -1 and -inf. NaN and +inf count as the least finite number.
    """
    rows, vocab = logits.shape
    if not rows:
        return
    blocks = triton.cdiv(vocab, BLOCK)
    summarize(logits, scratch.maxima, scratch.sums, None, weights=True)
    _logprobs_kernel[(rows,)](
        logits,
        tokens,
        values,
        ids,
        scratch.maxima,
        scratch.sums,
        logits.stride(0),
        values.stride(0),
        ids.stride(0),
        vocab,
        blocks,
        top,
        MAX_BLOCKS=triton.next_power_of_2(blocks),
        BLOCK=BLOCK,
        num_warps=1,  # its reductions then need no barrier
    )
