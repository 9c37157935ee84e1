"""Prefill attention of one span by torch's fused kernels, which know no block tables.

A span attends to its own K and V causally. With a cached prefix it also attends to the gathered prefix, which all of
it sees, and the two results are merged by their log-sum-exps. No window, no soft cap, 16-bit types. cuDNN prepares a
plan for each shape that it has not seen, so lengths that vary freely cost it time while serving.
"""

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

# (q [tokens, heads, head_dim], k and v [keys, kv_heads, head_dim], causal, scale)
# -> (out [tokens, heads, head_dim], natural log-sum-exps float32 [heads, tokens])
Attend = Callable[[Tensor, Tensor, Tensor, bool, float], tuple[Tensor, Tensor]]


def _heads_first(x: Tensor) -> Tensor:
    """[n, heads, head_dim] as [1, heads, n, head_dim]."""
    return x.transpose(0, 1).unsqueeze(0)


def cudnn_attend(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """An `Attend` by cuDNN, which reads grouped KV heads as they are. Raises RuntimeError where it cannot."""
    heads_first = map(_heads_first, (q, k, v))
    result = torch.ops.aten._scaled_dot_product_cudnn_attention(
        *heads_first, None, True, 0.0, causal, False, scale=scale
    )
    return result[0][0].transpose(0, 1), result[1].view(q.shape[1], q.shape[0])


def flash_attend(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """An `Attend` by the FlashAttention-2 in torch."""
    heads_first = map(_heads_first, (q, k, v))
    result = torch.ops.aten._scaled_dot_product_flash_attention(*heads_first, 0.0, causal, False, scale=scale)
    return result[0][0].transpose(0, 1), result[1].view(q.shape[1], q.shape[0])


@triton.jit(do_not_specialize=["slot", "length", "gathered_stride"])
def _gather_kernel(
    pool,  # [pages, 2, kv_heads, page_size, head_dim]
    tables,
    gathered,  # [2, kv_heads, capacity, head_dim]
    slot,
    length,
    table_stride,
    gathered_stride,
    kv_heads: tl.constexpr,
    page_size: tl.constexpr,
    head_dim: tl.constexpr,
    width: tl.constexpr,
):
    """Program (page of the table, half and KV head)."""
    index, half = tl.program_id(0), tl.program_id(1).to(tl.int64)
    lanes, dims = tl.arange(0, page_size), tl.arange(0, width)
    there = (index * page_size + lanes < length)[:, None] & (dims < head_dim)[None, :]
    inner = lanes[:, None] * head_dim + dims[None, :]
    slab: tl.constexpr = page_size * head_dim
    page = tl.load(tables + slot.to(tl.int64) * table_stride + index).to(tl.int64)
    x = tl.load(pool + (page * (2 * kv_heads) + half) * slab + inner, mask=there)
    tl.store(gathered + half * gathered_stride + index.to(tl.int64) * slab + inner, x, mask=there)


def gather_prefix(pool: Tensor, tables: Tensor, slot: int, length: int, gathered: Tensor) -> tuple[Tensor, Tensor]:
    """K and V of a sequence's first `length` positions, one after the other: views [length, kv_heads, head_dim].

    `pool`: [pages, 2, kv_heads, page_size, head_dim]; `tables`: int32 [slots, max_pages]; `gathered`: [2, kv_heads,
    capacity, head_dim], contiguous, written up to `length`.
    """
    _, _, kv_heads, page_size, head_dim = pool.shape
    if length > gathered.shape[2]:
        raise ValueError(f"a prefix of {length} tokens, and room for {gathered.shape[2]}")
    if length:
        _gather_kernel[(triton.cdiv(length, page_size), 2 * kv_heads)](
            pool,
            tables,
            gathered,
            slot,
            length,
            tables.stride(0),
            gathered.stride(1),
            kv_heads=kv_heads,
            page_size=page_size,
            head_dim=head_dim,
            width=triton.next_power_of_2(head_dim),
            num_warps=4,
        )
    k, v = gathered[:, :, :length].transpose(1, 2)
    return k, v


@triton.jit(do_not_specialize=["tokens"])
def _merge_kernel(
    one,  # [tokens, heads * head_dim]
    one_lse,  # float32 [heads, tokens]
    two,
    two_lse,
    out,  # [tokens, heads * head_dim]
    tokens,
    one_stride,
    two_stride,
    out_stride,
    heads: tl.constexpr,
    head_dim: tl.constexpr,
    block: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * block + tl.arange(0, block)
    inside = columns < heads * head_dim
    at = (columns // head_dim).to(tl.int64) * tokens + token
    lse1 = tl.load(one_lse + at, mask=inside, other=0.0)
    lse2 = tl.load(two_lse + at, mask=inside, other=0.0)
    # The sigmoid of the difference, with an exponent that never overflows.
    smaller = tl.exp(-tl.abs(lse1 - lse2))
    share = tl.where(lse1 >= lse2, 1.0, smaller) / (1.0 + smaller)
    x = tl.load(one + token * one_stride + columns, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(two + token * two_stride + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * out_stride + columns, (y + (x - y) * share).to(out.dtype.element_ty), mask=inside)


def merge(one: Tensor, one_lse: Tensor, two: Tensor, two_lse: Tensor, out: Tensor) -> None:
    """Attention over two sets of keys from the attentions over each: their mean weighted by exp(lse).

    `one`, `two`: [tokens, heads, head_dim]; `one_lse`, `two_lse`: float32 [heads, tokens], contiguous; `out`: [tokens,
    heads * head_dim], may be strided.
    """
    tokens, heads, head_dim = one.shape
    one, two = one.reshape(tokens, -1), two.reshape(tokens, -1)
    block = min(1024, triton.next_power_of_2(heads * head_dim))
    _merge_kernel[(tokens, triton.cdiv(heads * head_dim, block))](
        one,
        one_lse,
        two,
        two_lse,
        out,
        tokens,
        one.stride(0),
        two.stride(0),
        out.stride(0),
        heads=heads,
        head_dim=head_dim,
        block=block,
        num_warps=4,
    )


def sdpa_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pool: Tensor,
    tables: Tensor,
    slot: int,
    start: int,
    gathered: Tensor,
    out: Tensor,
    *,
    heads: int,
    kv_heads: int,
    scale: float,
    attend: Attend = cudnn_attend,
) -> None:
    """Causal attention of one span of a sequence, whose tokens sit at positions `start` and following.

    `q`: [tokens, heads * head_dim], `k`, `v`: [tokens, kv_heads * head_dim], its own, rotated; rows may be strided;
    `pool`: [pages, 2, kv_heads, page_size, head_dim], the positions below `start` written; `tables`: int32 [slots,
    max_pages]; `gathered`: workspace [2, kv_heads, at least start, head_dim]; `out`: like `q`. `attend` allocates.
    """
    q = q.unflatten(1, (heads, -1))
    own, own_lse = attend(q, k.unflatten(1, (kv_heads, -1)), v.unflatten(1, (kv_heads, -1)), True, scale)
    if start == 0:
        out.unflatten(1, (heads, -1)).copy_(own)
        return
    cached, cached_lse = attend(q, *gather_prefix(pool, tables, slot, start, gathered), False, scale)
    merge(cached, cached_lse, own, own_lse, out)
