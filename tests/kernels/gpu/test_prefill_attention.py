"""Prefill attention against plain attention in float64, a sequence at a time; everything not to be read is NaN."""

import math
import random
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from twostroke.kernels.gpu.prefill_attention import PrefillShape, prefill_attention, prefill_shape, prefill_tiles
from twostroke.kernels.tolerances import TOLERANCES

NAN = float("nan")
SMALL = PrefillShape(rows=32, keys=16, warps=4, stages=2, pack=1)  # quick in the interpreter, several blocks a tile


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
    return [(start, counts[(i + j) % 5]) for i, start in enumerate(starts) for j in range(2)] + [(37, 300), (0, 300)]


def test_tiles_cover_the_spans_longest_first():
    tiles = prefill_tiles([(3, 10, 5, 7), (1, 15, 9, 0), (2, 24, 1, 500)], 4)
    assert tiles == [(2, 24, 1, 500), (3, 14, 1, 11), (3, 10, 4, 7), (1, 23, 1, 8), (1, 19, 4, 4), (1, 15, 4, 0)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_head_dims(device, head_dim, dtype):
    spans = [(0, 1), (37, 2), (16, 17), (200, 16), (0, 70), (1, 15)]
    Case(spans, device=device, dtype=dtype, head_dim=head_dim, heads=3, kv_heads=1).check()
