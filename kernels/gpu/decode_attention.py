"""Attention of one query token a row over its sequence's pages (split-KV, GQA-packed), for a step's decode rows.

Flash-Decoding (Dao et al., 2023): a row's pages are split among several programs, each with an online softmax of its
own, and the partial results are merged. The query heads that share a KV head are the rows of one matrix product, so
that K and V are read once. Scores, sums and partial results are float32.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from .decode_plan import DecodeLaunch, DecodePlan, decode_launch
from .overlap import after_the_one_in_front

MIN_HEADS = 16  # rows that tl.dot needs


@triton.jit
def _merge(
    partial, max_sum, out, first_item, count, head, real,
    heads: tl.constexpr, head_dim: tl.constexpr, block_h: tl.constexpr, block_d: tl.constexpr, batch: tl.constexpr,
):  # fmt: skip
    """Merges a row's `count` partial results from `first_item` on, for the heads `head` that are `real`, into `out`."""
    d = tl.arange(0, block_d)
    largest = tl.full([block_h], float("-inf"), tl.float32)
    total = tl.zeros([block_h], tl.float32)
    sums = tl.zeros([block_h, block_d], tl.float32)
    for i in range(0, count, batch):
        part = i + tl.arange(0, batch)
        item = (first_item + part).to(tl.int64)
        mask = (part < count)[:, None] & real[None, :]
        at = item[:, None] * heads + head[None, :]
        # From L2: other multiprocessors wrote them, maybe while this kernel ran.
        m = tl.load(max_sum + 2 * at, mask=mask, other=float("-inf"), cache_modifier=".cg")
        s = tl.load(max_sum + 2 * at + 1, mask=mask, other=0.0, cache_modifier=".cg")
        here = mask[:, :, None] & (d < head_dim)[None, None, :]
        acc_at = partial + at[:, :, None] * head_dim + d[None, None, :]
        acc = tl.load(acc_at, mask=here, other=0.0, cache_modifier=".cg")
        above = tl.maximum(largest, tl.max(m, 0))
        above = tl.where(real, above, 0.0)
        old = tl.exp2(largest - above)
        weight = tl.exp2(m - above[None, :])
        total = total * old + tl.sum(weight * s, 0)
        sums = sums * old[:, None] + tl.sum(weight[:, :, None] * acc, 0)
        largest = above
    total = tl.where(real, total, 1.0)
    tl.store(
        out + head[:, None] * head_dim + d[None, :],
        (sums / total[:, None]).to(out.dtype.element_ty),
        mask=real[:, None] & (d < head_dim)[None, :],
    )


@triton.jit
def _merge_kernel(
    partial, max_sum, spans, out, out_stride,
    heads: tl.constexpr, head_dim: tl.constexpr, block_d: tl.constexpr, items_block: tl.constexpr,
    pdl: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) // heads
    first = tl.load(spans + 2 * row)
    count = tl.load(spans + 2 * row + 1)
    if pdl:
        first += after_the_one_in_front()
    if count == 1:  # written by the attention kernel itself
        return
    head = tl.program_id(0) % heads + tl.arange(0, 1)
    out += row.to(tl.int64) * out_stride
    _merge(partial, max_sum, out, first, count, head, head < heads, heads, head_dim, 1, block_d, items_block)


@triton.jit
def _decode_kernel(
    q, pool, tables, items, partial, max_sum, arrived, out, q_stride, table_stride, out_stride,
    kv_heads: tl.constexpr, group: tl.constexpr, head_dim: tl.constexpr, page_size: tl.constexpr,
    rate: tl.constexpr, cap: tl.constexpr, window: tl.constexpr,
    block_h: tl.constexpr, block_n: tl.constexpr, block_d: tl.constexpr,
    fused: tl.constexpr, merge_h: tl.constexpr, merge_items: tl.constexpr, pdl: tl.constexpr,
):  # fmt: skip
    heads: tl.constexpr = kv_heads * group
    blocks: tl.constexpr = (group + block_h - 1) // block_h
    slab_size: tl.constexpr = page_size * head_dim
    unit = tl.program_id(0) % (kv_heads * blocks)
    record = items + tl.program_id(0) // (kv_heads * blocks) * 8
    row = tl.load(record)
    slot = tl.load(record + 1)
    first_page = tl.load(record + 2)
    pages = tl.load(record + 3)
    length = tl.load(record + 4)
    first_item = tl.load(record + 5)
    count = tl.load(record + 6)
    if row < 0:
        return
    kv_head = unit // blocks
    member = unit % blocks * block_h + tl.arange(0, block_h)  # of the KV head's group
    head = kv_head * group + member
    d = tl.arange(0, block_d)
    inside = (d < head_dim)[None, :]
    mine = (member < group)[:, None] & inside
    begin = first_page * page_size
    end = tl.minimum(begin + pages * page_size, length)
    low = tl.maximum(length - window, 0) if window else 0
    if window and block_n < page_size:
        begin = tl.maximum(begin, low // block_n * block_n)  # a block wholly masked would give inf - inf
    table = tables + slot.to(tl.int64) * table_stride
    # A turn's page ids are loaded a turn ahead: where K's address came from a load of its own turn, Triton would keep
    # half as many turns in flight.
    lane = tl.arange(0, block_n) if block_n > page_size else 0
    page = tl.load(table + (begin + lane) // page_size, mask=begin + lane < end, other=0)
    if pdl:  # the plan and the tables are older than the kernel before this one
        zero = after_the_one_in_front()
        q += zero
        pool += zero
    query = tl.load(q + row.to(tl.int64) * q_stride + head[:, None] * head_dim + d[None, :], mask=mine, other=0.0)

    m = tl.full([block_h], float("-inf"), tl.float32)
    total = tl.zeros([block_h], tl.float32)
    acc = tl.zeros([block_h, block_d], tl.float32)
    for start in range(begin, end, block_n):
        n = start + tl.arange(0, block_n)
        valid = (n >= low) & (n < end)
        if block_n <= page_size:
            slab = pool + (page.to(tl.int64) * (2 * kv_heads) + kv_head) * slab_size + start % page_size * head_dim
            k_at = slab + tl.arange(0, block_n)[:, None] * head_dim + d[None, :]
        else:
            offset = (page.to(tl.int64) * (2 * kv_heads) + kv_head) * slab_size + n % page_size * head_dim
            k_at = pool + offset[:, None] + d[None, :]
        page = tl.load(table + (start + block_n + lane) // page_size, mask=start + block_n + lane < end, other=0)
        # Masked positions are not read: there may be NaN, and 0 * NaN is NaN.
        read = valid[:, None] & inside
        k = tl.load(k_at, mask=read, other=0.0)
        v = tl.load(k_at + kv_heads * slab_size, mask=read, other=0.0)
        scores = tl.dot(query, tl.trans(k), input_precision="ieee")
        scores *= rate
        if cap != 0.0:  # cap * tanh(x) = cap - 2 * cap / (1 + exp(2 x))
            scores = cap - 2 * cap / (1 + tl.exp2(scores))
        scores = tl.where(valid[None, :], scores, float("-inf"))
        above = tl.maximum(m, tl.max(scores, 1))
        old = tl.exp2(m - above)
        weight = tl.exp2(scores - above[:, None])
        total = total * old + tl.sum(weight, 1)
        acc = tl.dot(weight.to(v.dtype), v, acc * old[:, None], input_precision="ieee")
        m = above

    if count == 1:
        result = acc / tl.where(total > 0, total, 1.0)[:, None]  # a padding row's item is empty
        out_at = out + row.to(tl.int64) * out_stride + head[:, None] * head_dim + d[None, :]
        tl.store(out_at, result.to(out.dtype.element_ty), mask=mine)
        return
    at = (tl.program_id(0) // (kv_heads * blocks)).to(tl.int64) * heads + head
    tl.store(partial + at[:, None] * head_dim + d[None, :], acc, mask=mine)
    tl.store(max_sum + 2 * at, m, mask=member < group)
    tl.store(max_sum + 2 * at + 1, total, mask=member < group)
    if fused:
        tl.debug_barrier()  # all threads' results are written before one thread says so
        arrived += row * heads + unit
        if tl.atomic_add(arrived, 1, sem="acq_rel", scope="gpu") == count - 1:
            tl.store(arrived, 0)  # for the next layer
            one = unit % blocks * block_h + tl.arange(0, merge_h)
            out += row.to(tl.int64) * out_stride
            _merge(
                partial, max_sum, out, first_item, count, kv_head * group + one, one < group,
                heads, head_dim, merge_h, block_d, merge_items,
            )  # fmt: skip


class DecodeScratch:
    """Partial results of one layer's decode attention, preallocated; plans and layers may share one."""

    def __init__(self, max_items: int, heads: int, head_dim: int, *, device: torch.device) -> None:
        """`max_items`: the most of any plan used with it."""
        self.partial = torch.empty(max_items, heads, head_dim, dtype=torch.float32, device=device)
        self.max_sum = torch.empty(max_items, heads, 2, dtype=torch.float32, device=device)
        self.arrived = torch.zeros(max_items, heads, dtype=torch.int32, device=device)  # programs of a row that ended

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return self.partial.nbytes + self.max_sum.nbytes + self.arrived.nbytes


def decode_attention(
    q: Tensor,
    pool: Tensor,
    tables: Tensor,
    slots: Tensor,
    positions: Tensor,
    plan: DecodePlan,
    scratch: DecodeScratch,
    out: Tensor,
    *,
    kv_heads: int,
    page_size: int,
    scale: float,
    cap: float,
    window: int,
    launch: DecodeLaunch | None = None,
    pdl: bool = False,
) -> None:
    """Attention of one token a row over the positions up to its own, or the last `window` of them (0: all), into `out`.

    Query head h reads KV head h // (heads // kv_heads); scores are products * `scale`, softly bounded by `cap` (0: no).
    `q`: [rows, heads * head_dim], rows may be strided; `pool`: [pages, 2, kv_heads, page_size, head_dim], contiguous,
    this step's K and V written, of q's dtype; `tables`: int32 [slots, max_pages]; `slots`, `positions`: int32 [rows],
    already seen by `plan_decode` with the same page size and window; `out`: as q. Padding rows (slot 0) become zeros.
    `pdl`: may start while the kernel before it in the stream still runs, and lets the next one do so (programmatic
    dependent launch; Hopper and later). That kernel may write `q` and the pool, but not the plan nor the tables.
    Raises ValueError where the shapes do not fit.
    """
    rows, width = q.shape
    head_dim = pool.shape[4]
    heads = width // head_dim
    if pool.shape[1:4] != (2, kv_heads, page_size) or out.shape != q.shape or heads * head_dim != width:
        raise ValueError(f"q {list(q.shape)}, out {list(out.shape)} and pool {list(pool.shape)} do not fit together")
    if slots.shape[0] != rows or positions.shape[0] != rows or heads % kv_heads:
        raise ValueError(f"{rows} rows of {heads} heads on {kv_heads}, with {slots.shape[0]} slots")
    items = plan.items_of(rows)
    if items > scratch.partial.shape[0] or scratch.partial.shape[1:] != (heads, head_dim):
        raise ValueError(f"{items} items of {heads} heads of {head_dim} in a scratch of {list(scratch.partial.shape)}")
    launch = launch or decode_launch(head_dim, pool.element_size(), rows)
    group, block_d = heads // kv_heads, triton.next_power_of_2(head_dim)
    merge_heads = min(MIN_HEADS, triton.next_power_of_2(group))
    rate = scale * math.log2(math.e)  # of a product in the exponent of 2
    _decode_kernel[(items * kv_heads * triton.cdiv(group, MIN_HEADS),)](
        q,
        pool,
        tables,
        plan.items,
        scratch.partial,
        scratch.max_sum,
        scratch.arrived,
        out,
        q.stride(0),
        tables.stride(0),
        out.stride(0),
        kv_heads=kv_heads,
        group=group,
        head_dim=head_dim,
        page_size=page_size,
        rate=2 * rate / cap if cap else rate,
        cap=cap * math.log2(math.e),
        window=window,
        block_h=MIN_HEADS,
        block_n=launch.block,
        block_d=block_d,
        fused=launch.fused,
        merge_h=merge_heads,
        merge_items=max(1, min(16, 4096 // (merge_heads * block_d))),
        pdl=pdl,
        num_warps=launch.warps,
        num_stages=launch.stages,
        launch_pdl=pdl,
    )
    if launch.fused:
        return
    _merge_kernel[(rows * heads,)](
        scratch.partial,
        scratch.max_sum,
        plan.spans,
        out,
        out.stride(0),
        heads=heads,
        head_dim=head_dim,
        block_d=block_d,
        items_block=max(1, min(16, 4096 // block_d)),
        pdl=pdl,
        num_warps=4,
        launch_pdl=pdl,
    )
