"""Attention over a paged KV pool: the plain torch reference, which is also what a CPU runs.

Products accumulate and softmax is computed in float32. In between, scores and probabilities are kept in the pool's
type, but float16 scores, which could overflow, in float32. With bfloat16 this costs no accuracy that could be measured
on a real model (its divergence from float32 is 0.0008 either way), and spares copies of K.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from .attention_plan import AttentionPlan, Chunk, DecodeGroup, PoolShape
from .scratch import Scratch

QUERY_BLOCK = 64  # queries of a chunk at once; keys after a block's last query are not read
MAX_SCORES = 1 << 24  # scores at once: 32 to 64 MiB


class Scores(NamedTuple):
    """How a model makes its attention scores."""

    scale: float | None = None  # of the products; None: head_dim^-0.5
    cap: float = 0.0  # soft bound: cap * tanh(score / cap); 0: none


PLAIN = Scores()


def paged_attention(
    queries: Tensor, pool_slabs: Tensor, plan: AttentionPlan, scratch: Scratch, scores: Scores = PLAIN
) -> Tensor:
    """Causal attention of a step's tokens over their sequences' pages, within the plan's window if it has one.

    Query head h reads KV head h // (heads / kv_heads).
    `queries`: [tokens, heads * head_dim], may be strided, in the pool's dtype; `pool_slabs`: a layer's pool as
    [pages * 2 * kv_heads, page_size * head_dim], this step's KV written. Returns [tokens, heads * head_dim].
    Slots that belong to no position of a sequence may hold anything, NaN too.
    """
    out = torch.empty(queries.shape, dtype=queries.dtype, device=queries.device)
    if scores.scale is None:
        scores = scores._replace(scale=plan.shape.head_dim**-0.5)
    for group in plan.groups:
        span = slice(group.first, group.first + group.count)
        _decode(queries[span], pool_slabs, group, plan.shape, out[span], scratch, scores)
    for chunk in plan.chunks:
        span = slice(chunk.first, chunk.first + chunk.count)
        _prefill(queries[span], pool_slabs, chunk, plan.shape, out[span], scratch, scores)
    return out


def _decode(
    queries: Tensor,
    pool_slabs: Tensor,
    group: DecodeGroup,
    shape: PoolShape,
    out: Tensor,
    scratch: Scratch,
    rule: Scores,
) -> None:
    """`queries`, `out`: [sequences, heads * head_dim]."""
    rows = group.count * shape.kv_heads
    kv = _gather(pool_slabs, group.slabs, scratch)
    q = queries.reshape(rows, -1, shape.head_dim)  # the query heads of one KV head side by side
    out = out.view(q.shape)
    if group.beyond is None or group.mask is None:
        k, v = kv.view(2, rows, 1, -1, shape.head_dim)[:, :, :, group.low : group.length]
        if not rule.cap:
            q = q.unsqueeze(1)
            out.copy_(functional.scaled_dot_product_attention(q, k, v, scale=rule.scale).squeeze(1))
            return
        k, v = k.squeeze(1), v.squeeze(1)
    else:
        # Masked slots get probability 0, but 0 * NaN is NaN: what lies there must go.
        kv.view(-1, shape.head_dim).index_fill_(0, group.beyond, 0.0)
        k, v = kv.view(2, rows, -1, shape.head_dim)
    k = _widened(k, scratch).transpose(1, 2)
    mask = None if group.mask is None else group.mask.to(k.dtype)
    scores = _scores(q.to(k.dtype), k, mask, rule)
    torch.bmm(torch.softmax(scores, dim=-1).to(v.dtype), v, out=out)


def _scores(q: Tensor, k: Tensor, mask: Tensor | None, rule: Scores) -> Tensor:
    """`q`: [rows, group, head_dim]; `k`: [rows, head_dim, length]; `mask`: [rows, 1, length]."""
    scale = rule.scale or 1.0
    if not rule.cap and mask is not None:
        return torch.baddbmm(mask, q, k, alpha=scale)
    scores = torch.bmm(q, k).mul_(scale / rule.cap).tanh_().mul_(rule.cap)
    return scores if mask is None else scores.add_(mask)


def _prefill(
    queries: Tensor, pool_slabs: Tensor, chunk: Chunk, shape: PoolShape, out: Tensor, scratch: Scratch, rule: Scores
) -> None:
    """`queries`, `out`: [chunk, heads * head_dim]."""
    kv_heads, head_dim, scale = shape.kv_heads, shape.head_dim, rule.scale or 1.0
    length = chunk.start + chunk.count
    k, v = _gather(pool_slabs, chunk.slabs, scratch).view(2, kv_heads, -1, head_dim)[:, :, :length]
    k = _widened(k, scratch).transpose(1, 2)
    q = queries.view(chunk.count, kv_heads, -1, head_dim).permute(1, 2, 0, 3).to(k.dtype)
    out = out.view(chunk.count, kv_heads, -1, head_dim).permute(1, 2, 0, 3)  # [kv_heads, group, chunk, head_dim]
    heads = kv_heads * q.shape[1]
    block = max(1, min(QUERY_BLOCK, MAX_SCORES // (heads * length)))
    later = torch.ones(block, block, dtype=torch.bool, device=q.device).triu_(1)
    for i in range(0, chunk.count, block):
        n = min(block, chunk.count - i)
        seen = chunk.start + i + n
        low = max(0, chunk.start + i + 1 - chunk.window) if chunk.window else 0
        rows = q[:, :, i : i + n].reshape(kv_heads, -1, head_dim)
        scores = scratch.take("scores", (kv_heads, rows.shape[1], seen - low), k.dtype)
        torch.baddbmm(scores, rows, k[:, :, low:seen], beta=0.0, alpha=scale, out=scores)
        if rule.cap:
            scores.div_(rule.cap).tanh_().mul_(rule.cap)
        by_query = scores.view(kv_heads, -1, n, seen - low)
        by_query[..., seen - low - n :].masked_fill_(later[:n, :n], float("-inf"))
        if chunk.window and seen > chunk.window:
            # Column c is seen no more by row r where low + c <= start + i + r - window; such c are below n.
            gone = torch.ones(n, n, dtype=torch.bool, device=q.device).tril_(chunk.start + i - chunk.window - low)
            by_query[..., :n].masked_fill_(gone, float("-inf"))
        torch.softmax(scores, dim=-1, out=scores)
        out[:, :, i : i + n] = torch.bmm(scores.to(v.dtype), v[:, low:seen]).view(kv_heads, -1, n, head_dim)


def _widened(k: Tensor, scratch: Scratch) -> Tensor:
    """K in the type of the scores."""
    return scratch.take("keys", k.shape, torch.float32).copy_(k) if k.dtype == torch.float16 else k


def _gather(pool_slabs: Tensor, slabs: Tensor, scratch: Scratch) -> Tensor:
    """Copies of these slabs, one after the other: [slabs, page_size * head_dim]."""
    out = scratch.take("kv", (slabs.numel(), pool_slabs.shape[1]), pool_slabs.dtype)
    return torch.index_select(pool_slabs, 0, slabs, out=out)
