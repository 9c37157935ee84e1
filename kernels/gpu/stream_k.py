"""Stream-K kernels of `gemm`: a weight's tiles laid end to end along k, dealt to programs in equal, contiguous shares.

Two ways through the same shares: one pipelined loop over all of it (`flat_kernel`), so that the weight goes on arriving
while a tile is finished; or one a tile (`tiles_kernel`), which spares registers and shared memory.
"""

import triton
import triton.language as tl

from .overlap import start_with_weight


@triton.jit
def _share_begin(lane, base, rest):
    """First block of a lane's share: the first `rest` lanes have base + 1 blocks, the others base."""
    return lane * base + tl.minimum(lane, rest)


@triton.jit
def _share_of(block, base, rest):
    """The lane whose share holds a block."""
    long = rest * (base + 1)
    return tl.where(block < long, block // (base + 1), rest + (block - long) // base)


@triton.jit
def _barrier(INTERPRETED: tl.constexpr):
    """`tl.debug_barrier`, which would keep Triton from pipelining the loop around it."""
    if not INTERPRETED:
        tl.inline_asm_elementwise("bar.sync 0; // $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _load(
    x, weight, m, n, k, x_stride, x_row, tile_row, block,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """A block of the weight [BLOCK_N, BLOCK_K] and of x^T [BLOCK_K, BLOCK_M]; zeros past their ends."""
    if TMA:
        w = weight.load([tile_row, block * BLOCK_K])
        rows = tl.trans(x.load([x_row, block * BLOCK_K]))
    else:
        row = tl.arange(0, BLOCK_N)
        column = tl.arange(0, BLOCK_M)
        element = tl.arange(0, BLOCK_K)
        w_at = weight + (tile_row.to(tl.int64) * k + block * BLOCK_K) + row[:, None] * k + element[None, :]
        x_at = x + (x_row.to(tl.int64) * x_stride + block * BLOCK_K) + column[None, :] * x_stride + element[:, None]
        within = (tile_row + row < n)[:, None]
        inside = (x_row + column < m)[None, :]
        if not EVEN_K:
            left = k - block * BLOCK_K
            within = within & (element < left)[None, :]
            inside = inside & (element < left)[:, None]
        w = tl.load(w_at, mask=within, other=0.0, eviction_policy="evict_first")
        rows = tl.load(x_at, mask=inside, other=0.0)
    return w, rows


@triton.jit
def _store(
    total, bias, out, m, n, out_stride, x_tile, tile,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    row = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    column = x_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    if HAS_BIAS:
        total += tl.load(bias + row, mask=row < n, other=0.0).to(tl.float32)[:, None]
    at = out + column[None, :].to(tl.int64) * out_stride + row[:, None]
    tl.store(at, total.to(out.dtype.element_ty), mask=(column < m)[None, :] & (row < n)[:, None])


@triton.jit
def _finish(
    acc, bias, out, partials, counters, m, n, out_stride, x_tile, tile, begin, end, lane, lanes, base, rest, depth,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HAS_BIAS: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Stores a tile's sum; where other lanes hold parts of it, adds the parts if this lane is the last to arrive.

    `acc` is used in both branches and never handed on by one: Triton 3.7 forgets to wait for `wgmma` there.
    """
    start = tile * depth
    if (begin <= start) & (start + depth <= end):
        _store(acc, bias, out, m, n, out_stride, x_tile, tile, BLOCK_M, BLOCK_N, HAS_BIAS)
    else:
        column = tl.arange(0, BLOCK_M)
        inside = (x_tile * BLOCK_M + column < m)[None, :]
        cell = partials + x_tile.to(tl.int64) * lanes * (2 * BLOCK_M * BLOCK_N)
        cell = cell + column[None, :] * BLOCK_N + tl.arange(0, BLOCK_N)[:, None]
        own = lane * 2 + (begin < start).to(tl.int32)  # a lane shares at most its first and its last tile
        tl.store(cell + own.to(tl.int64) * (BLOCK_M * BLOCK_N), acc, mask=inside)
        first_lane = _share_of(start, base, rest)
        last_lane = _share_of(start + depth - 1, base, rest)
        counter = counters + x_tile * tl.cdiv(n, BLOCK_N) + tile
        _barrier(INTERPRETED)  # the count is one thread's, and releases what all of them stored
        if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == last_lane - first_lane:
            total = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
            for giver in range(first_lane, last_lane + 1):
                slot = giver * 2 + (_share_begin(giver, base, rest) < start).to(tl.int32)
                at = cell + slot.to(tl.int64) * (BLOCK_M * BLOCK_N)
                total += tl.load(at, mask=inside, other=0.0, cache_modifier=".cg")
            tl.store(counter, 0)
            _store(total, bias, out, m, n, out_stride, x_tile, tile, BLOCK_M, BLOCK_N, HAS_BIAS)


@triton.jit(do_not_specialize=["m", "lanes"])
def tiles_kernel(
    x, weight, weight_pointer, bias, out, partials, counters, m, n, k, x_stride, out_stride, lanes,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, HAS_BIAS: tl.constexpr, EVEN_K: tl.constexpr,
    TMA: tl.constexpr, PDL: tl.constexpr, PREFETCH: tl.constexpr, PRECISION: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of x, lanes). x [m, k], weight [n, k]: pointers, or with TMA descriptors of blocks of them."""
    x_tile = tl.program_id(0)
    lane = tl.program_id(1)
    depth = tl.cdiv(k, BLOCK_K)
    blocks = tl.cdiv(n, BLOCK_N) * depth
    base = blocks // lanes
    rest = blocks - base * lanes
    begin = _share_begin(lane, base, rest)
    end = _share_begin(lane + 1, base, rest)
    if PDL:
        begin += start_with_weight(
            weight_pointer, begin // depth * BLOCK_N, begin % depth * BLOCK_K, n, k, BLOCK_N, BLOCK_K, PREFETCH
        )
    done = begin
    while done < end:
        tile = done // depth
        stop = tl.minimum(end, (tile + 1) * depth)
        acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
        for block in range(done - tile * depth, stop - tile * depth):
            w, rows = _load(
                x, weight, m, n, k, x_stride, x_tile * BLOCK_M, tile * BLOCK_N, block,
                BLOCK_M, BLOCK_N, BLOCK_K, EVEN_K, TMA,
            )  # fmt: skip
            acc = tl.dot(w, rows, acc, input_precision=PRECISION)
        _finish(
            acc, bias, out, partials, counters, m, n, out_stride, x_tile, tile, begin, end, lane, lanes, base, rest,
            depth, BLOCK_M, BLOCK_N, HAS_BIAS, INTERPRETED,
        )  # fmt: skip
        done = stop


@triton.jit(do_not_specialize=["m", "lanes"])
def flat_kernel(
    x, weight, weight_pointer, bias, out, partials, counters, m, n, k, x_stride, out_stride, lanes,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, HAS_BIAS: tl.constexpr, EVEN_K: tl.constexpr,
    TMA: tl.constexpr, PDL: tl.constexpr, PREFETCH: tl.constexpr, PRECISION: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """As `tiles_kernel`."""
    x_tile = tl.program_id(0)
    lane = tl.program_id(1)
    depth = tl.cdiv(k, BLOCK_K)
    blocks = tl.cdiv(n, BLOCK_N) * depth
    base = blocks // lanes
    rest = blocks - base * lanes
    begin = _share_begin(lane, base, rest)
    end = _share_begin(lane + 1, base, rest)
    if PDL:
        begin += start_with_weight(
            weight_pointer, begin // depth * BLOCK_N, begin % depth * BLOCK_K, n, k, BLOCK_N, BLOCK_K, PREFETCH
        )
    tile = begin // depth
    block = begin - tile * depth
    acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    for done in range(begin, end):
        w, rows = _load(
            x, weight, m, n, k, x_stride, x_tile * BLOCK_M, tile * BLOCK_N, block,
            BLOCK_M, BLOCK_N, BLOCK_K, EVEN_K, TMA,
        )  # fmt: skip
        acc = tl.dot(w, rows, acc, input_precision=PRECISION)
        if (block == depth - 1) | (done == end - 1):
            _finish(
                acc, bias, out, partials, counters, m, n, out_stride, x_tile, tile, begin, end, lane, lanes, base, rest,
                depth, BLOCK_M, BLOCK_N, HAS_BIAS, INTERPRETED,
            )  # fmt: skip
            acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
        wrap = block == depth - 1
        block = tl.where(wrap, 0, block + 1)
        tile = tl.where(wrap, tile + 1, tile)
