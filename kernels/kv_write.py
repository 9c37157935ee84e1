"""Writing a step's keys and values into the page pool."""

import torch
from torch import Tensor


def kv_rows(slots: Tensor, kv_heads: int, page_size: int) -> Tensor:
    """Where each token's heads go in a layer's pool seen as rows of head_dim elements.

    `slots`: int64 [tokens], page * page_size + offset in the page. Returns int64 [tokens * 2 * kv_heads], ordered
    token, K before V, head: for a layer's pool [pages, 2, kv_heads, page_size, head_dim].
    """
    page, offset = slots // page_size, slots % page_size
    first = page * (2 * kv_heads * page_size) + offset
    heads = torch.arange(2 * kv_heads, device=slots.device) * page_size
    return (first.unsqueeze(1) + heads).view(-1)


def write_kv_(pool_rows: Tensor, rows: Tensor, kv: Tensor) -> None:
    """Scatters keys and values.

    `pool_rows`: a layer's pool as [pages * 2 * kv_heads * page_size, head_dim]; `rows`: from `kv_rows`, no row twice;
    `kv`: [tokens, 2 * kv_heads * head_dim], K heads then V heads, may be strided.
    """
    pool_rows.index_copy_(0, rows, kv.reshape(-1, pool_rows.shape[1]))
