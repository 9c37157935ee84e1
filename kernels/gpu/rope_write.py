"""What lies between a layer's QKV matrix and its attention: head norms, rotation and the paged write, in one kernel."""

import triton
import triton.language as tl
from torch import Tensor

from .overlap import after_the_one_in_front

_HALF_ELEMENTS = 1024  # of a program's first halves: one 16-byte access of 8 elements a thread
_WARPS = 4


@triton.jit(do_not_specialize=["max_pages"])
def _rope_write_kernel(
    qkv,  # [tokens, (heads + 2 * kv_heads) * head_dim]
    positions,  # int32 [tokens]
    slots,  # int32 [tokens]
    angles,  # float32 [positions, rotary_dim]
    pool,  # [pages, 2, kv_heads, page_size, head_dim]
    tables,  # int32 [slots, max_pages]
    qk_norm,  # float32 [heads + kv_heads, head_dim] or None
    max_pages,
    heads: tl.constexpr,
    kv_heads: tl.constexpr,
    head_dim: tl.constexpr,
    rotary_dim: tl.constexpr,
    page_size: tl.constexpr,
    eps: tl.constexpr,
    head_block: tl.constexpr,
    half_block: tl.constexpr,
    rest_block: tl.constexpr,
    pdl: tl.constexpr,
):
    half: tl.constexpr = rotary_dim // 2
    rest: tl.constexpr = head_dim - rotary_dim
    dtype = qkv.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + token)
    slot = tl.load(slots + token).to(tl.int64)
    head = tl.program_id(1) * head_block + tl.arange(0, head_block)
    is_query = head < heads
    rotates = (head < heads + kv_heads)[:, None]
    stored = (head >= heads) & (head < heads + 2 * kv_heads)
    known = (head < heads + 2 * kv_heads)[:, None]

    column = tl.arange(0, half_block)[None, :]
    in_half = column < half
    source = qkv + (token * (heads + 2 * kv_heads) + head)[:, None] * head_dim
    if not pdl:
        raw1 = tl.load(source + column, mask=known & in_half, other=0.0)
        raw2 = tl.load(source + half + column, mask=known & in_half, other=0.0)
    page = tl.load(tables + slot * max_pages + position // page_size).to(tl.int64)
    turn = angles + position.to(tl.int64) * rotary_dim + column
    cos = tl.load(turn, mask=in_half, other=0.0)
    sin = tl.load(turn + half, mask=in_half, other=0.0)
    if pdl:
        source += after_the_one_in_front()
        raw1 = tl.load(source + column, mask=known & in_half, other=0.0)
        raw2 = tl.load(source + half + column, mask=known & in_half, other=0.0)
    x1, x2 = raw1.to(tl.float32), raw2.to(tl.float32)
    if rest:
        rest_column = tl.arange(0, rest_block)[None, :]
        in_rest = rest_column < rest
        raw3 = tl.load(source + rotary_dim + rest_column, mask=known & in_rest, other=0.0)
    if qk_norm is not None:
        weight = qk_norm + head[:, None] * head_dim
        gain1 = tl.load(weight + column, mask=rotates & in_half, other=0.0)
        gain2 = tl.load(weight + half + column, mask=rotates & in_half, other=0.0)
        squares = tl.sum(x1 * x1, axis=1) + tl.sum(x2 * x2, axis=1)
        if rest:
            x3 = raw3.to(tl.float32)
            squares += tl.sum(x3 * x3, axis=1)
        inverse = (1.0 / tl.sqrt(squares / head_dim + eps))[:, None]
        x1 *= inverse * gain1
        x2 *= inverse * gain2
        if rest:
            x3 *= inverse * tl.load(weight + rotary_dim + rest_column, mask=rotates & in_rest, other=0.0)
            raw3 = tl.where(rotates, x3.to(dtype), raw3)
    # Fused by name: else the compiler chooses which product is rounded, not always the same one.
    y1 = tl.where(rotates, tl.fma(x1, cos, -(x2 * sin)).to(dtype), raw1)
    y2 = tl.where(rotates, tl.fma(x2, cos, x1 * sin).to(dtype), raw2)

    # K heads, then V heads: as in a page.
    place = page * (2 * kv_heads * page_size) + (head - heads).to(tl.int64) * page_size + position % page_size
    target = pool + place[:, None] * head_dim
    query, kv = is_query[:, None], stored[:, None]
    tl.store(source + column, y1, mask=query & in_half)
    tl.store(source + half + column, y2, mask=query & in_half)
    tl.store(target + column, y1, mask=kv & in_half)
    tl.store(target + half + column, y2, mask=kv & in_half)
    if rest:
        if qk_norm is not None:
            tl.store(source + rotary_dim + rest_column, raw3, mask=query & in_rest)
        tl.store(target + rotary_dim + rest_column, raw3, mask=kv & in_rest)


def rope_write(
    qkv: Tensor,  # [tokens, (heads + 2 * kv_heads) * head_dim] contiguous: its Q is overwritten
    positions: Tensor,  # int32 [tokens]
    slots: Tensor,  # int32 [tokens]
    angles: Tensor,  # float32 [positions, rotary_dim]: cosines, then sines of the rotary_dim / 2 frequencies
    pool: Tensor,  # [pages, 2 (K, V), kv_heads, page_size, head_dim] contiguous: written
    tables: Tensor,  # int32 [slots, max_pages] contiguous
    *,
    heads: int,
    kv_heads: int,
    page_size: int,
    eps: float,  # of the head norms
    qk_norm: Tensor | None,  # float32 [heads + kv_heads, head_dim], a row a head
    pdl: bool = False,
) -> None:
    """Normalises (where the model does) and rotates Q in place and K on its way into the pool; V goes there as it is.

    A token's page is tables[slot, position // page_size], so padding rows (slot 0, position 0) write to the sink.
    Computed in float32 and rounded once. K and V within `qkv` are left as they were. The rotation pairs element i
    with i + rotary_dim / 2 and leaves those from rotary_dim on.
    `pdl`: may start while the kernel before it in the stream still runs, and lets the next one do so (programmatic
    dependent launch; Hopper and later). That kernel may write `qkv`, but none of the other inputs.
    Source: Su et al., RoFormer (2021); Henry et al., Query-Key Normalization for Transformers (2020).
    """
    head_dim, rotary_dim = pool.shape[-1], angles.shape[-1]
    half_block = triton.next_power_of_2(rotary_dim // 2)
    all_heads = heads + 2 * kv_heads
    head_block = min(max(_HALF_ELEMENTS // half_block, 1), triton.next_power_of_2(all_heads))
    grid = (qkv.shape[0], triton.cdiv(all_heads, head_block))
    _rope_write_kernel[grid](
        qkv,
        positions,
        slots,
        angles,
        pool,
        tables,
        qk_norm,
        tables.shape[1],
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        rotary_dim=rotary_dim,
        page_size=page_size,
        eps=eps,
        head_block=head_block,
        half_block=half_block,
        rest_block=triton.next_power_of_2(max(head_dim - rotary_dim, 1)),
        pdl=pdl,
        num_warps=_WARPS,
        launch_pdl=pdl,
    )
