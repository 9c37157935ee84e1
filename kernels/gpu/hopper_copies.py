"""K and V of paged sequences into shared memory, by the bulk tensor copies of Hopper GPUs.

A copy is 64 columns of a page. Side by side they make up the swizzled tile that the matrix units read, so a block may
span several pages. One warp starts them all.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from .hopper_items import item, item_count, tile_keys

COLUMNS = gl.constexpr(64)  # of a copy: 128 bytes, the widest swizzle
FLAT = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))


@gluon.jit
def _copy_block(
    slabs,  # descriptor of the pool as [pages * 2 * kv_heads * page_size, head_dim], in tiles of [rows, COLUMNS]
    tiles,  # shared [stages * tiles of a block, rows, COLUMNS]
    ready,
    stage,
    table,
    slab,  # of the page: 0 .. kv_heads - 1 for K, from there on for V
    begin,  # first position
    end,  # pages from there on are not in the table
    block: gl.constexpr,
    width: gl.constexpr,
    kv_heads: gl.constexpr,
    page_size: gl.constexpr,
):
    """Starts copying a block of K or V."""
    rows: gl.constexpr = page_size if page_size < block else block
    down: gl.constexpr = block // rows
    across: gl.constexpr = width // COLUMNS
    for i in gl.static_range(down):
        position = begin + i * rows
        page = gl.load(table + position // page_size, mask=position < end, other=0)
        row = (page * (2 * kv_heads) + slab) * page_size + position % page_size
        for c in gl.static_range(across):
            tma.async_copy_global_to_shared(
                slabs, [row, c * COLUMNS], ready, tiles.index((stage * across + c) * down + i)
            )


@gluon.jit
def copy_tiles(
    slabs,
    k_tiles,
    v_tiles,
    ready,  # shared [stages, 1]: K of block j and V of block j - 1 are there
    free,  # shared [stages, 1]: they were used
    tables,
    table_stride,
    tiles,
    items,
    head_blocks: gl.constexpr,
    blocks_of_group: gl.constexpr,  # head blocks of a KV head
    stages: gl.constexpr,
    block: gl.constexpr,
    width: gl.constexpr,
    kv_heads: gl.constexpr,
    page_size: gl.constexpr,
    window: gl.constexpr,
):
    """The copying warp: blocks in the order in which they are used, an item's first ones while the last is at work."""
    taken, use = item_count(items), gl.to_tensor(0)
    for i in range(taken):
        head_block, slot, _, count, start = item(tiles, i, taken, head_blocks)
        table, kv_head = tables + slot.to(gl.int64) * table_stride, head_block // blocks_of_group
        origin, end = tile_keys(count, start, block, window)
        blocks = (end - origin + block - 1) // block
        for j in range(blocks + 1):
            stage, begin = (use + j) % stages, origin + j * block
            now = ready.index(stage)
            mbarrier.wait(free.index(stage), ((use + j) // stages + 1) & 1)
            mbarrier.expect(now, 2 * block * width * 2, pred=(j > 0) & (j < blocks))
            mbarrier.expect(now, block * width * 2, pred=(j == 0) | (j == blocks))
            if j < blocks:
                _copy_block(slabs, k_tiles, now, stage, table, kv_head, begin, end, block, width, kv_heads, page_size)
            if j > 0:
                _copy_block(
                    slabs, v_tiles, now, stage, table, kv_head + kv_heads, begin - block, end,
                    block, width, kv_heads, page_size,
                )  # fmt: skip
        use += blocks + 1
