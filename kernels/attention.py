"""Attention over a paged KV pool: the plain torch reference, which is also what a CPU runs.

Scores and softmax are float32 whatever the pool's type; probabilities meet V in the pool's type.
"""

import torch
from torch import Tensor
from torch.nn import functional

from .attention_plan import AttentionPlan, Chunk, DecodeGroup, PoolShape

QUERY_BLOCK = 64  # queries of a chunk at once; keys after a block's last query are not read
MAX_SCORES = 1 << 24  # scores at once: 64 MiB


def paged_attention(queries: Tensor, pool_slabs: Tensor, plan: AttentionPlan) -> Tensor:
    """Causal attention of a step's tokens over their sequences' pages.

    Query head h reads KV head h // (heads / kv_heads).
    `queries`: [tokens, heads * head_dim], may be strided, in the pool's dtype; `pool_slabs`: a layer's pool as
    [pages * 2 * kv_heads, page_size * head_dim], this step's KV written. Returns [tokens, heads * head_dim].
    Slots that belong to no position of a sequence may hold anything, NaN too.
    """
    out = torch.empty(queries.shape, dtype=queries.dtype, device=queries.device)
    for group in plan.groups:
        span = slice(group.first, group.first + group.count)
        _decode(queries[span], pool_slabs, group, plan.shape, out[span])
    for chunk in plan.chunks:
        span = slice(chunk.first, chunk.first + chunk.count)
        _prefill(queries[span], pool_slabs, chunk, plan.shape, out[span])
    return out


def _decode(queries: Tensor, pool_slabs: Tensor, group: DecodeGroup, shape: PoolShape, out: Tensor) -> None:
    """`queries`, `out`: [sequences, heads * head_dim]."""
    rows = group.count * shape.kv_heads
    kv = pool_slabs.index_select(0, group.slabs).view(2, rows, -1, shape.head_dim)
    q = queries.reshape(rows, -1, shape.head_dim)  # the query heads of one KV head side by side
    out = out.view(q.shape)
    if group.beyond is None or group.beyond_rows is None:
        k, v = kv[:, :, : group.length].unsqueeze(2)
        out.copy_(functional.scaled_dot_product_attention(q.unsqueeze(1), k, v).squeeze(1))
        return
    k, v = kv
    # Probabilities there are 0, but 0 * NaN is NaN.
    v.view(-1, shape.head_dim).index_fill_(0, group.beyond_rows, 0.0)
    scores = _scores(q.to(torch.float32), k.to(torch.float32))
    scores.masked_fill_(group.beyond, float("-inf"))
    torch.bmm(torch.softmax(scores, dim=-1).to(v.dtype), v, out=out)


def _prefill(queries: Tensor, pool_slabs: Tensor, chunk: Chunk, shape: PoolShape, out: Tensor) -> None:
    """`queries`, `out`: [chunk, heads * head_dim]."""
    kv_heads, head_dim = shape.kv_heads, shape.head_dim
    length = chunk.start + chunk.count
    kv = pool_slabs.index_select(0, chunk.slabs).view(2, kv_heads, -1, head_dim)
    k, v = kv[0, :, :length].to(torch.float32), kv[1, :, :length]
    q = queries.view(chunk.count, kv_heads, -1, head_dim).permute(1, 2, 0, 3).to(torch.float32)
    out = out.view(chunk.count, kv_heads, -1, head_dim).permute(1, 2, 0, 3)  # [kv_heads, group, chunk, head_dim]
    heads = kv_heads * q.shape[1]
    block = max(1, min(QUERY_BLOCK, MAX_SCORES // (heads * length)))
    later = torch.ones(block, block, dtype=torch.bool, device=q.device).triu_(1)
    for i in range(0, chunk.count, block):
        n = min(block, chunk.count - i)
        seen = chunk.start + i + n
        rows = q[:, :, i : i + n]
        scores = _scores(rows.reshape(kv_heads, -1, head_dim), k[:, :seen]).view(kv_heads, -1, n, seen)
        scores[..., seen - n :].masked_fill_(later[:n, :n], float("-inf"))
        p = torch.softmax(scores, dim=-1).to(v.dtype).view(kv_heads, -1, seen)
        out[:, :, i : i + n] = torch.bmm(p, v[:, :seen]).view(rows.shape)


def _scores(q: Tensor, k: Tensor) -> Tensor:
    """q k^T / sqrt(head_dim). `q`: [n, queries, head_dim]; `k`: [n, keys, head_dim]; float32."""
    empty = q.new_empty(q.shape[0], q.shape[1], k.shape[1])
    return torch.baddbmm(empty, q, k.transpose(1, 2), beta=0.0, alpha=q.shape[-1] ** -0.5)
