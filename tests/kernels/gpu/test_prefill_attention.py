"""Prefill attention against plain attention in float64, a sequence at a time; everything not to be read is NaN."""

import math
import random
from collections.abc import Sequence
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

from twostroke.kernels.gpu.prefill_attention import prefill_attention, prefill_tiles
from twostroke.kernels.gpu.prefill_shape import PrefillShape, prefill_shape
from twostroke.kernels.tolerances import TOLERANCES

NAN = float("nan")
SMALL = PrefillShape(rows=64, keys=16, warps=4, stages=2, pack=1)  # many tiles and blocks in a short prompt


def plain(q: Tensor, k: Tensor, v: Tensor, start: int, scale: float, cap: float = 0.0, window: int = 0) -> Tensor:
    """`q`: [tokens, heads, head_dim]; `k`, `v`: [kv_heads, length, head_dim]. In float64; returns what q is like."""
    group = q.shape[1] // k.shape[0]
    k, v = (x.double().repeat_interleave(group, 0) for x in (k, v))
    scores = torch.einsum("thd,hld->htl", q.double(), k) * scale
    if cap:
        scores = cap * (scores / cap).tanh()
    behind = (start + torch.arange(q.shape[0], device=q.device))[:, None] - torch.arange(k.shape[1], device=q.device)
    seen = (behind >= 0) & (behind < window) if window else behind >= 0
    return torch.einsum("htl,hld->thd", scores.masked_fill(~seen, -math.inf).softmax(-1), v)


class Case:
    """A pool full of NaN but for some sequences, and the queries of their last tokens, in one buffer with others."""

    def __init__(
        self,
        spans: Sequence[tuple[int, int]],
        *,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        heads: int = 4,
        kv_heads: int = 2,
        head_dim: int = 64,
        page: int = 16,
        cap: float = 0.0,
        window: int = 0,
        scale: float | None = None,
        pages: int = 0,
        seed: int = 0,
    ) -> None:
        """`spans`: (start, count) each; `pages`: at least so many in the pool."""
        generator = torch.Generator(device).manual_seed(seed)
        self.spans, self.heads, self.kv_heads, self.page, self.window = list(spans), heads, kv_heads, page, window
        self.cap, self.scale = cap, scale or head_dim**-0.5
        needed = [-(-sum(span) // page) for span in spans]
        pages = max(pages, 1 + sum(needed) + 2)
        free = list(range(1, pages))
        random.Random(seed).shuffle(free)
        free.sort(key=lambda number: number < pages - 1 - sum(needed))  # the highest ones first
        self.pool = torch.full((pages, 2, kv_heads, page, head_dim), NAN, dtype=dtype, device=device)
        self.tables = torch.zeros(len(spans) + 1, max(needed) + 1, dtype=torch.int32, device=device)
        self.kv: list[Tensor] = []
        for slot, (span, n) in enumerate(zip(spans, needed, strict=True), 1):
            ids = torch.tensor([free.pop(0) for _ in range(n)], device=device)
            self.tables[slot, :n] = ids
            kv = torch.randn(2, kv_heads, sum(span), head_dim, generator=generator, device=device).to(dtype)
            self.kv.append(kv)
            padded = torch.full((2, kv_heads, n * page, head_dim), NAN, dtype=dtype, device=device)
            padded[:, :, : sum(span)] = kv
            self.pool[ids] = padded.view(2, kv_heads, n, page, head_dim).permute(2, 0, 1, 3, 4)
        tokens = sum(count for _, count in spans)
        self.q = torch.full((tokens + 4, heads * head_dim + 32), NAN, dtype=dtype, device=device)
        self.q[2 : tokens + 2, : heads * head_dim] = torch.randn(
            tokens, heads * head_dim, generator=generator, device=device
        )
        self.shape = prefill_shape(heads, kv_heads, head_dim, page, dtype)

    def run(self, shape: PrefillShape | None = None, cuts: Sequence[int] = ()) -> Tensor:
        """Rows of all tokens. Each span is cut after so many tokens as `cuts` says, in turn, into several."""
        shape = shape or self.shape
        spans, first = [], 2
        for slot, (start, count) in enumerate(self.spans, 1):
            done = 0
            for size in [*cuts, count]:
                size = min(size, count - done)
                if size:
                    spans.append((slot, first + done, size, start + done))
                done += size
            first += count
        tiles = [*prefill_tiles(spans, shape.tokens), (0, 0, 0, 0)]  # the last one is padding
        q = self.q[:, : self.heads * self.pool.shape[-1]]
        out = torch.full((q.shape[0], q.shape[1] + 8), NAN, dtype=q.dtype, device=q.device)
        prefill_attention(
            q,
            self.pool,
            self.tables,
            torch.tensor(tiles, dtype=torch.int32, device=q.device),
            out[:, : q.shape[1]],
            heads=self.heads,
            kv_heads=self.kv_heads,
            page_size=self.page,
            scale=self.scale,
            cap=self.cap,
            window=self.window,
            shape=shape,
        )
        assert out[:2].isnan().all()
        assert out[-2:].isnan().all()
        assert out[:, q.shape[1] :].isnan().all()
        return out[2:-2, : q.shape[1]]

    def expected(self) -> Tensor:
        rows, first = [], 2
        for (start, count), (k, v) in zip(self.spans, self.kv, strict=True):
            q = self.q[first : first + count, : self.heads * k.shape[-1]].view(count, self.heads, -1)
            rows.append(plain(q, k, v, start, self.scale, self.cap, self.window).flatten(1))
            first += count
        return torch.cat(rows)

    def check(self, shape: PrefillShape | None = None) -> None:
        relative, absolute = TOLERANCES[self.pool.dtype]
        torch.testing.assert_close(self.run(shape).double(), self.expected(), rtol=relative, atol=absolute)


def around(page: int) -> list[tuple[int, int]]:
    """Spans (start, count) of all the counts, over cached prefixes of all the lengths."""
    counts, starts = [1, 2, page - 1, page, page + 1], [0, 1, page, 37, 200]
    return [(start, counts[(i + j) % 5]) for i, start in enumerate(starts) for j in range(2)] + [(37, 300)]


def test_tiles_cover_the_spans_longest_first():
    tiles = prefill_tiles([(3, 10, 5, 7), (1, 15, 9, 0), (2, 24, 1, 500)], 4)
    assert tiles == [(2, 24, 1, 500), (3, 14, 1, 11), (3, 10, 4, 7), (1, 23, 1, 8), (1, 19, 4, 4), (1, 15, 4, 0)]


@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.slow), torch.float16])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_head_dims(device, head_dim, dtype):
    spans = [(0, 1), (37, 2), (16, 17), (200, 16), (0, 70), (1, 15)]
    Case(spans, device=device, dtype=dtype, head_dim=head_dim, heads=3, kv_heads=1).check()


@pytest.mark.parametrize("group", [1, 2, 3, 4, 7, 8, 16, 64])
@pytest.mark.parametrize("kv_heads", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_query_heads_of_a_kv_head(device, group, kv_heads):
    spans = [(0, 5), (37, 21), (3, 1)]
    Case(spans, device=device, heads=group * kv_heads, kv_heads=kv_heads).check()


@pytest.mark.parametrize(
    ("page", "dtype"),
    [
        *((page, torch.float16) for page in (16, 32, 64, 128)),
        (16, torch.float32),
        *(pytest.param(page, torch.float32, marks=pytest.mark.slow) for page in (32, 64, 128)),
    ],
)
def test_page_sizes_and_lengths(device, page, dtype):
    Case(around(page), device=device, dtype=dtype, page=page, heads=4, kv_heads=2, head_dim=32).check()


OFTEN = [(window, 16) for window in (1, 2, 16, 17, 33, 64, 150, 1000)] + [(1, 64), (64, 64), (150, 64)]
SELDOM = [pytest.param(window, 64, marks=pytest.mark.slow) for window in (2, 16, 17, 33, 1000)]


@pytest.mark.parametrize(("window", "page"), [*OFTEN, *SELDOM])
def test_windows(device, window, page):
    spans = [(0, 90), (200, 20), (37, 2), (16, 1), (63, 40)]
    Case(spans, device=device, page=page, window=window, head_dim=32).check()


@pytest.mark.parametrize("window", [0, 24])
@pytest.mark.parametrize(("scale", "cap"), [(0.06, 0.0), (None, 2.0), (0.05, 50.0), (4.0, 20.0)])
def test_scales_and_soft_caps(device, scale, cap, window):
    Case([(0, 70), (100, 9)], device=device, scale=scale, cap=cap, window=window, head_dim=32).check()


@pytest.mark.parametrize(
    ("keys", "window"),
    [
        (16, 0),
        (32, 40),
        (64, 40),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in ((16, 40), (32, 0), (64, 0))),
    ],
)
def test_bulk_copies(device, keys, window):
    shape = PrefillShape(rows=64, keys=keys, warps=4, stages=3, pack=2, bulk=True)
    spans = [(0, 1), (0, 70), (63, 2), (150, 9)]
    head_dim = 80 if keys == 32 else 64
    case = Case(spans, device=device, dtype=torch.float16, page=64, head_dim=head_dim, window=window)
    case.check(shape)
    assert torch.equal(case.run(shape), case.run(PrefillShape(64, keys, 4, 3, 2)))


@pytest.mark.parametrize("keys", [32, 128])
def test_queries_in_registers(device, keys):
    case = Case([(0, 70), (63, 2), (150, 9)], device=device, dtype=torch.float16, page=64)
    case.check(PrefillShape(64, keys, 4, 2, 2, held=True))


def test_bulk_copies_need_pages_of_a_block_at_least(device):
    with pytest.raises(ValueError, match="pages of 16"):
        Case([(0, 3)], device=device, dtype=torch.float16).run(PrefillShape(64, 32, 4, 2, 1, bulk=True))


def test_no_tiles(device):
    case = Case([(0, 1)], device=device)
    q, tiles = case.q[:, :256], torch.zeros(0, 4, dtype=torch.int32, device=device)
    prefill_attention(q, case.pool, case.tables, tiles, q, heads=4, kv_heads=2, page_size=16, scale=1.0)


CUTS = [(1,), (2, 1, 15), (17, 63, 64, 1)]


@pytest.fixture
def exact_dot(device, monkeypatch):
    """In the interpreter, products whose order of summation does not depend on the row, as on a GPU: BLAS's does."""
    if device.type == "cuda":
        return
    from triton.runtime import interpreter

    def dot(self: Any, a: Any, b: Any, d: Any, *_: Any) -> Any:
        product = numpy.einsum("mk,kn->mn", a.data.astype(numpy.float32), b.data.astype(numpy.float32))
        return interpreter.TensorHandle(product + d.data, d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)


@pytest.mark.parametrize(
    ("window", "cap", "dtype"),
    [
        (0, 0.0, torch.float32),
        (50, 0.0, torch.float16),
        (0, 30.0, torch.float16),
        pytest.param(0, 0.0, torch.float16, marks=pytest.mark.slow),
        pytest.param(50, 0.0, torch.float32, marks=pytest.mark.slow),
        pytest.param(0, 30.0, torch.float32, marks=pytest.mark.slow),
    ],
)
def test_rows_are_the_same_bits_however_a_prompt_is_cut(device, exact_dot, window, cap, dtype):
    case = Case([(0, 170), (37, 30)], device=device, dtype=dtype, window=window, cap=cap, heads=2, kv_heads=1)
    for shape in (SMALL, case.shape):
        whole = case.run(shape)
        for cuts in CUTS:
            assert torch.equal(case.run(shape, cuts), whole), cuts


def test_rows_are_the_same_bits_whatever_else_is_in_the_call(device, exact_dot):
    case = Case([(37, 90), (0, 150), (200, 3)], device=device, dtype=torch.float16)
    together, first = case.run(), 0
    for slot, (start, count) in enumerate(case.spans, 1):
        alone = Case([(start, count)], device=device, dtype=torch.float16)
        alone.pool, alone.tables = case.pool, case.tables[[0, slot]]
        alone.q = case.q[first : first + count + 4].clone()
        alone.q[:2] = alone.q[-2:] = NAN
        assert torch.equal(alone.run(), together[first : first + count])
        first += count


GPU_SIZES = [(64, 32, 8, head_dim) for head_dim in (64, 80, 96, 128, 256)]  # each compiles anew: no full product
GPU_SIZES += [(page, 32, 8, 128) for page in (16, 32, 128)] + [(64, 4, 4, 64), (64, 16, 1, 128), (16, 14, 2, 64)]


@pytest.mark.gpu
@pytest.mark.parametrize(("page", "heads", "kv_heads", "head_dim"), GPU_SIZES)
def test_bfloat16(device, page, heads, kv_heads, head_dim):
    case = Case(
        around(page), device=device, dtype=torch.bfloat16, heads=heads, kv_heads=kv_heads, head_dim=head_dim, page=page
    )
    case.check()
    assert torch.equal(case.run(cuts=(1, 17, 64, 100)), case.run())


@pytest.mark.gpu
@pytest.mark.parametrize("window", [0, 1024])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("start", [4095, 32000])
def test_long_prefixes(device, start, dtype, window):
    case = Case([(start, 700), (0, 4097)], device=device, dtype=dtype, page=64, head_dim=128, heads=8, window=window)
    case.check()
    assert torch.equal(case.run(cuts=(1, 128, 300)), case.run())


@pytest.mark.gpu
@pytest.mark.parametrize("bulk", [False, True])
def test_pages_beyond_two_to_the_31_elements(device, bulk):
    """The pool is 8.6 GB and the sequence in its last pages."""
    case = Case([(100, 200)], device=device, dtype=torch.bfloat16, page=64, head_dim=128, kv_heads=2, pages=1 << 17)
    assert int(case.tables.max()) * case.pool.stride(0) > 2**31
    case.check(PrefillShape(128, 64, 8, 2, 2, bulk=bulk))


def hopper(keys: int = 128, stages: int = 3, pack: int = 1) -> PrefillShape:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("no Hopper GPU")
    return PrefillShape(128, keys, 8, stages, pack, hopper=True)


def every_length(blocks: int, keys: int) -> list[tuple[int, int]]:
    """Spans that end in each of the first blocks: at its first key, its last, or between; short ones and whole ones."""
    ends = [b * keys + extra for b in range(blocks) for extra in (1, 2, keys // 2 + 5, keys - 1, keys)]
    return [(0, end) for end in ends] + [(end - count, count) for end in ends for count in (1, 65) if count < end]


# A warpgroup that is not waited for, or a stage that is overwritten, shows in bits. Programs take several items each.
@pytest.mark.gpu
@pytest.mark.parametrize(("keys", "stages"), [(128, 3), (64, 5), (64, 2), (128, 2)])
def test_hopper_blocks_and_stages(device, keys, stages):
    case = Case(every_length(5, keys), device=device, dtype=torch.bfloat16, page=64, head_dim=128, heads=8)
    case.check(hopper(keys, stages))
    expected = case.run(hopper(keys, stages))
    for _ in range(50):
        assert torch.equal(case.run(hopper(keys, stages)), expected)
    assert torch.equal(case.run(hopper(keys, stages, pack=4)), expected)


@pytest.mark.gpu
@pytest.mark.parametrize(("page", "heads", "kv_heads", "head_dim"), GPU_SIZES)
def test_hopper(device, page, heads, kv_heads, head_dim):
    dtype = torch.float16 if head_dim == 80 else torch.bfloat16
    case = Case(around(page), device=device, dtype=dtype, heads=heads, kv_heads=kv_heads, head_dim=head_dim, page=page)
    keys, stages = (64, 2) if head_dim == 256 else (128, 3)
    shape = hopper(keys, stages, pack=case.shape.pack if heads < 32 else 1)
    case.check(shape)
    assert torch.equal(case.run(shape, (1, 17, 64, 100)), case.run(shape))


@pytest.mark.gpu
@pytest.mark.parametrize(("window", "cap"), [(1, 0.0), (64, 0.0), (100, 30.0), (1000, 0.0), (0, 50.0)])
def test_hopper_windows_and_soft_caps(device, window, cap):
    spans = [(0, 130), (200, 20), (37, 2), (16, 1), (63, 900), *every_length(3, 128)]
    case = Case(spans, device=device, dtype=torch.bfloat16, page=64, head_dim=128, heads=8, window=window, cap=cap)
    case.check(hopper())
    whole = case.run(hopper())
    for _ in range(10):
        assert torch.equal(case.run(hopper()), whole)
    assert torch.equal(case.run(hopper(), (1, 17, 64, 100)), whole)


@pytest.mark.gpu
@pytest.mark.parametrize("start", [4095, 32000])
def test_hopper_long_prefixes(device, start):
    case = Case([(start, 700), (0, 4097)], device=device, dtype=torch.bfloat16, page=64, head_dim=128, heads=16)
    case.check(hopper())
    whole = case.run(hopper())
    for _ in range(20):
        assert torch.equal(case.run(hopper()), whole)
    assert torch.equal(case.run(hopper(), (1, 128, 300)), whole)


@pytest.mark.gpu
def test_hopper_pages_beyond_two_to_the_31_elements(device):
    case = Case([(100, 200)], device=device, dtype=torch.bfloat16, page=64, head_dim=128, kv_heads=2, pages=1 << 17)
    case.check(hopper())


def test_hopper_tiles_are_of_two_warpgroups():
    attention = pytest.importorskip("twostroke.kernels.gpu.hopper_attention").hopper_attention
    x, pool = torch.zeros(1), torch.zeros(1, 2, 1, 64, 64, dtype=torch.bfloat16)
    tiles = torch.zeros(1, 4, dtype=torch.int32)
    for shape in (PrefillShape(64, 64, 8, 3, 1), PrefillShape(128, 64, 4, 3, 1), PrefillShape(128, 64, 8, 1, 1)):
        with pytest.raises(ValueError, match="cannot be cut so"):
            attention(x, pool, x, tiles, x, heads=1, kv_heads=1, page_size=64, scale=1.0, shape=shape)
