"""Logits with the tokens left out that a constraint does not allow next."""

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096  # tokens of a program
_WARPS = 4


@triton.jit
def _mask_kernel(
    logits,  # [rows, vocab]
    places,  # int32 [rows]
    words,  # int32 [masks, ceil(vocab / 32)]
    out,  # [rows, vocab], contiguous
    stride,
    vocab,
    width,
    blocks,
    BLOCK: tl.constexpr,
):
    row = (tl.program_id(0) // blocks).to(tl.int64)
    tokens = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    inside = tokens < vocab
    values = tl.load(logits + row * stride + tokens, mask=inside).to(tl.float32)
    place = tl.load(places + row)
    if place >= 0:
        bits = tl.load(words + place.to(tl.int64) * width + tokens // 32, mask=inside, other=0)
        values = tl.where((bits >> (tokens % 32)) & 1 != 0, values, float("-inf"))
    tl.store(out + row * vocab + tokens, values.to(out.dtype.element_ty), mask=inside)


def mask_logits(logits: Tensor, places: Tensor, words: Tensor, out: Tensor) -> None:
    """Copies `logits` to `out`, -inf in place of what a row's mask forbids.

    `logits`: [rows, vocab], contiguous rows; `places`: int32 [rows], each row's mask, -1 for none; `words`: int32
    [masks, ceil(vocab / 32)], contiguous: token t is allowed where bit t % 32 of word t // 32 is 1; `out`: like
    `logits`, contiguous, written.
    """
    rows, vocab = logits.shape
    if not rows:
        return
    blocks = triton.cdiv(vocab, _BLOCK)
    _mask_kernel[(rows * blocks,)](
        logits,
        places,
        words,
        out,
        logits.stride(0),
        vocab,
        triton.cdiv(vocab, 32),
        blocks,
        BLOCK=_BLOCK,
        num_warps=_WARPS,
    )
