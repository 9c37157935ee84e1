"""The paged reference against plain attention in float64, a sequence and a head at a time."""

import math
import random

import pytest
import torch

from twostroke.kernels import attention
from twostroke.kernels.attention import PLAIN, Scores, paged_attention
from twostroke.kernels.attention_plan import PoolShape, Span, plan_attention
from twostroke.kernels.scratch import Scratch
from twostroke.kernels.tolerances import TOLERANCES

NAN = float("nan")


class Case:
    """A poisoned pool with some sequences in it, and the queries of their last tokens."""

    def __init__(
        self,
        sequences: list[tuple[int, int]],
        *,
        group: int,
        shape: PoolShape,
        dtype: torch.dtype,
        seed: int = 0,
        window: int = 0,
        scores: Scores = PLAIN,
    ) -> None:
        """`sequences`: (start, count) each."""
        self.window, self.scores = window, scores
        generator = torch.Generator().manual_seed(seed)
        self.shape, self.group, self.dtype = shape, group, dtype
        size = shape.page_size
        needed = [-(-(start + count) // size) for start, count in sequences]
        pages = 1 + sum(needed) + 2
        free = (torch.randperm(pages - 1, generator=generator) + 1).tolist()
        self.pool = torch.full((pages, 2, shape.kv_heads, size, shape.head_dim), NAN, dtype=dtype)
        self.spans, self.kv, first = [], [], 0
        for (start, count), n in zip(sequences, needed, strict=True):
            table = [free.pop() for _ in range(n)]
            kv = torch.randn(2, shape.kv_heads, start + count, shape.head_dim, generator=generator).to(dtype)
            for position in range(start + count):
                self.pool[table[position // size], :, :, position % size] = kv[:, :, position]
            spare = [free[0]] if free else []  # a page reserved ahead must not be read
            self.spans.append(Span(first, count, start, table + spare))
            self.kv.append(kv)
            first += count
        heads = shape.kv_heads * group
        wide = torch.randn(first, heads * shape.head_dim + 5, generator=generator).to(dtype)
        self.queries = wide[:, : heads * shape.head_dim]  # strided

    def run(self) -> torch.Tensor:
        slabs = self.pool.view(-1, self.shape.page_size * self.shape.head_dim)
        plan = plan_attention(self.spans, self.shape, window=self.window)
        return paged_attention(self.queries, slabs, plan, Scratch(), self.scores)

    def expected(self) -> torch.Tensor:
        rows = []
        scale, cap = self.scores.scale or 1 / math.sqrt(self.shape.head_dim), self.scores.cap
        for span, kv in zip(self.spans, self.kv, strict=True):
            for i in range(span.count):
                query = self.queries[span.first + i].double().view(-1, self.shape.head_dim)
                end = span.start + i + 1
                k, v = kv[:, :, max(0, end - self.window) if self.window else 0 : end].double()
                heads = []
                for h, q in enumerate(query):
                    s = k[h // self.group] @ q * scale
                    s = cap * (s / cap).tanh() if cap else s
                    heads.append(s.softmax(0) @ v[h // self.group])
                rows.append(torch.cat(heads))
        return torch.stack(rows)

    def check(self) -> None:
        relative, absolute = TOLERANCES[self.dtype]
        torch.testing.assert_close(self.run().double(), self.expected(), rtol=relative, atol=absolute)


DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize(("kv_heads", "group"), [(3, 3), (1, 16), (2, 1)])
def test_decode_rows_and_chunks_together(head_dim, kv_heads, group, dtype):
    shape = PoolShape(kv_heads, 16, head_dim)
    sequences = [(39, 1), (31, 1), (16, 1), (15, 1), (0, 1), (0, 5), (16, 3), (13, 70)]
    Case(sequences, group=group, shape=shape, dtype=dtype).check()


@pytest.mark.parametrize("page_size", [1, 16, 32, 64, 128])
def test_page_sizes(page_size):
    shape = PoolShape(2, page_size, 64)
    sequences = [(200, 1), (128, 1), (127, 1), (5, 1), (0, 129), (63, 2), (64, 64), (1, 130)]
    Case(sequences, group=2, shape=shape, dtype=torch.float32).check()


MIXED = [(200, 1), (127, 1), (40, 1), (33, 1), (32, 1), (31, 1), (5, 1), (0, 1), (0, 129), (63, 2), (64, 64), (30, 9)]


@pytest.mark.parametrize("window", [1, 2, 16, 17, 32, 33, 64, 150, 1000])
@pytest.mark.parametrize("page_size", [16, 64])
def test_windows(window, page_size):
    Case(MIXED, group=2, shape=PoolShape(2, page_size, 64), dtype=torch.float32, window=window).check()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [0, 20])
@pytest.mark.parametrize("scores", [Scores(0.06), Scores(None, 2.0), Scores(0.05, 50.0)])
def test_scales_and_soft_caps(scores, window, dtype):
    shape = PoolShape(3, 16, 80)
    Case(MIXED, group=3, shape=shape, dtype=dtype, window=window, scores=scores).check()


def test_pages_before_the_window_are_not_read():
    shape = PoolShape(2, 16, 64)
    case = Case([(100, 1), (90, 1), (64, 20)], group=2, shape=shape, dtype=torch.float32, window=20)
    expected = case.run()
    for span in case.spans:
        gone = max(0, span.start + 1 - 20) // 16
        case.pool[span.pages[:gone]] = NAN
    assert torch.equal(case.run(), expected)
    case.check()


@pytest.mark.parametrize("seed", range(24))
def test_generated_steps(seed):
    draw = random.Random(seed)
    variation = {}
    if seed >= 12:
        variation["window"] = draw.choice([1, 8, 16, 31, 70])
        variation["scores"] = draw.choice([PLAIN, Scores(0.06), Scores(0.1, 5.0)])
    shape = PoolShape(draw.choice([1, 2, 3]), draw.choice([16, 32]), draw.choice([64, 80]))
    single = sorted(((draw.randrange(150), 1) for _ in range(draw.randrange(9))), reverse=draw.random() < 0.7)
    chunks = [(draw.choice([0, 16, draw.randrange(100)]), draw.randrange(2, 90)) for _ in range(draw.randrange(1, 4))]
    sequences = single + chunks if draw.random() < 0.7 else chunks + single
    Case(
        sequences, group=draw.choice([1, 4, 7]), shape=shape, dtype=draw.choice(DTYPES), seed=seed, **variation
    ).check()


def test_a_sequence_alone_equals_the_same_among_others():
    shape = PoolShape(2, 16, 64)
    case = Case([(70, 1), (66, 1), (40, 1), (0, 33)], group=3, shape=shape, dtype=torch.float32)
    together = case.run()
    slabs = case.pool.view(-1, 16 * 64)
    for span in case.spans:
        rows = slice(span.first, span.first + span.count)
        plan = plan_attention([Span(0, span.count, span.start, span.pages)], shape)
        alone = paged_attention(case.queries[rows], slabs, plan, Scratch())
        torch.testing.assert_close(alone, together[rows], rtol=1e-5, atol=1e-6)


def test_long_chunks_are_cut_to_bounded_blocks(monkeypatch):
    monkeypatch.setattr(attention, "MAX_SCORES", 600)
    Case([(37, 40), (0, 11)], group=2, shape=PoolShape(2, 16, 64), dtype=torch.float32).check()
    Case([(37, 40), (0, 11)], group=2, shape=PoolShape(2, 16, 64), dtype=torch.float32, window=13).check()
    monkeypatch.setattr(attention, "MAX_SCORES", 1)
    Case([(3, 9)], group=2, shape=PoolShape(2, 16, 64), dtype=torch.float32).check()


def test_scratch_left_by_larger_steps_does_not_leak():
    shape, scratch = PoolShape(2, 16, 64), Scratch()
    for sequences in ([(300, 1), (290, 1), (10, 200)], [(20, 1), (3, 1), (5, 9)], [(7, 1)]):
        case = Case(sequences, group=2, shape=shape, dtype=torch.bfloat16)
        plan = plan_attention(case.spans, shape)
        result = paged_attention(case.queries, case.pool.view(-1, 16 * 64), plan, scratch)
        torch.testing.assert_close(result.double(), case.expected(), rtol=1.6e-2, atol=1.6e-2)


def test_large_scores_do_not_overflow():
    case = Case([(20, 1), (18, 1), (0, 17)], group=2, shape=PoolShape(1, 16, 64), dtype=torch.float32)
    case.queries *= 1e4
    assert case.run().isfinite().all()
    case.check()
