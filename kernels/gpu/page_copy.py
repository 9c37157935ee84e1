"""Copies of whole pages within a pool."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 2048  # words: 16 KiB
_WARPS = 8  # four 16-byte loads a thread in flight


@triton.jit(do_not_specialize=["pages"])
def _copy_pages_kernel(
    pool,  # int64 [layers, pages, words]
    pairs,  # int32 [n, 2]
    pages,
    words: tl.constexpr,
    block: tl.constexpr,
):
    chunks: tl.constexpr = (words + block - 1) // block
    pair = tl.program_id(0) // chunks
    source = tl.load(pairs + pair * 2).to(tl.int64)
    target = tl.load(pairs + pair * 2 + 1).to(tl.int64)
    place = (tl.program_id(0) % chunks) * block + tl.arange(0, block)
    layer = pool + tl.program_id(1).to(tl.int64) * pages * words
    content = tl.load(layer + source * words + place, mask=place < words)
    tl.store(layer + target * words + place, content, mask=place < words)


def copy_pages(
    pool: Tensor,  # [layers, pages, ...] contiguous; a page's bytes are a multiple of 8
    pairs: Tensor,  # int32 [n, 2]: (source, target)
) -> None:
    """Copies each source page to its target in every layer.

    No page may be a target twice, nor both a source and a target, but for padding: (0, 0) copies the sink to itself.
    """
    layers, pages = pool.shape[:2]
    if not pairs.shape[0] or not layers:
        return
    words = pool.view(layers, pages, -1).view(torch.int64)
    block = min(_BLOCK, triton.next_power_of_2(words.shape[2]))
    grid = (pairs.shape[0] * triton.cdiv(words.shape[2], block), layers)
    _copy_pages_kernel[grid](words, pairs, pages, words.shape[2], block, num_warps=_WARPS)
