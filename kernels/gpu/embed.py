"""Embedding of a step's tokens, those drawn a step ago included."""

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024  # 8 elements a thread


@triton.jit
def _embed_kernel(
    tokens,  # int32 or int64 [rows]
    slots,  # int32 [rows]
    last_tokens,  # int64 [slots]
    embedding,  # [vocab, width]
    hidden,  # float32 [rows, width]
    scale: tl.constexpr,
    width: tl.constexpr,
    block: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(tokens + row).to(tl.int64)
    slot = tl.load(slots + row)
    token = tl.where(token >= 0, token, tl.load(last_tokens + slot, mask=token < 0, other=0))
    token = tl.maximum(token, 0)  # where nothing could be drawn: the row is void, but must not be read from elsewhere
    columns = tl.program_id(1) * block + tl.arange(0, block)
    inside = columns < width
    x = tl.load(embedding + token * width + columns, mask=inside).to(tl.float32)
    tl.store(hidden + row * width + columns, x * scale, mask=inside)


def embed(
    tokens: Tensor,  # int32 or int64 [rows]: -1 where the host does not know it yet
    slots: Tensor,  # int32 [rows]
    last_tokens: Tensor,  # int64 [slots]: the token drawn last in each slot
    embedding: Tensor,  # [vocab, width] contiguous
    hidden: Tensor,  # float32 [rows, width] contiguous: written
    scale: float,
) -> None:
    """hidden[r] = scale * embedding[token], with token = tokens[r], or last_tokens[slots[r]] where that is negative.

    Ids are not checked: they must lie below `vocab`, that of `last_tokens[0]` too where padding rows hold -1. Where
    that is negative as well, nothing was drawn: token 0 stands in.
    """
    rows, width = hidden.shape
    block = min(_BLOCK, triton.next_power_of_2(width))
    grid = (rows, triton.cdiv(width, block))
    _embed_kernel[grid](tokens, slots, last_tokens, embedding, hidden, scale, width, block, num_warps=4)
