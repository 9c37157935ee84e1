"""The GPU's sampler draws what engine/sampler.py draws."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from twostroke.engine.request import NO_TOKEN, SamplingParams
from twostroke.engine.sampler import Draw, sample
from twostroke.kernels.gpu.draw import DrawParams, DrawScratch, draw, draw_greedy

INF, NAN = float("inf"), float("nan")
GREEDY = SamplingParams(temperature=0.0)


def padded(logits: Tensor, device: torch.device) -> Tensor:
    """The same on the device, as part of a wider tensor that is NaN elsewhere."""
    rows, vocab = logits.shape
    wide = torch.full((rows + 1, vocab + 16), NAN, dtype=logits.dtype, device=device)
    wide[:rows, :vocab] = logits.to(device)
    return wide[:rows, :vocab]


def scratch_of(logits: Tensor) -> DrawScratch:
    """Room for one row more than needed; holds NaN, which nobody may read."""
    scratch = DrawScratch(logits.shape[0] + 1, logits.shape[1], logits.device)
    for x in (scratch.maxima, scratch.sums, scratch.edges):
        x.fill_(NAN)
    scratch.active.fill_(2**30)
    scratch.lasts.fill_(-7)
    return scratch


def params_of(draws: Sequence[Draw], device: torch.device) -> DrawParams:
    def column(values: list[float] | list[int], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    own = [each.params for each in draws]
    return DrawParams(
        temperature=column([p.temperature for p in own], torch.float32),
        top_k=column([p.top_k for p in own], torch.int32),
        top_p=column([p.top_p for p in own], torch.float64),
        min_p=column([p.min_p for p in own], torch.float64),
        seed=column([p.seed - (1 << 64 if p.seed >> 63 else 0) for p in own], torch.int64),
        sample=column([each.sample for each in draws], torch.int32),
        position=column([each.position for each in draws], torch.int32),
    )


def drawn(logits: Tensor, draws: Sequence[Draw], device: torch.device) -> list[int]:
    logits = padded(logits, device)
    out = torch.full((len(draws),), -9, dtype=torch.int64, device=device)
    draw(logits, params_of(draws, device), out, scratch_of(logits))
    return [int(x) for x in out.tolist()]


def greedy(logits: Tensor, device: torch.device) -> list[int]:
    logits = padded(logits, device)
    out = torch.full((len(logits),), -9, dtype=torch.int64, device=device)
    draw_greedy(logits, out, scratch_of(logits))
    return [int(x) for x in out.tolist()]


def plain(logits: Tensor, draws: Sequence[Draw]) -> list[int]:
    return [token.token_id for token in sample(logits, draws)]


@pytest.mark.parametrize("vocab", [1, 255, 256, 257, 1000, 4096 + 256 + 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_greedy_takes_the_first_of_equals(vocab, dtype, device):
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randint(-9, 9, (5, vocab), generator=generator).to(dtype)
    logits[4] = -3
    expected = [row.index(max(row)) for row in logits.tolist()]
    assert greedy(logits, device) == expected
    assert drawn(logits, [Draw(GREEDY, 0, 0)] * 5, device) == expected


FILTERS = [{}, {"top_k": 7}, {"top_p": 0.9}, {"min_p": 0.05}, {"top_k": 200, "top_p": 0.7, "min_p": 0.01}]


def draws_of(filters: Sequence[dict[str, float]], heats: Sequence[float]) -> list[Draw]:
    return [
        Draw(SamplingParams(temperature=heat, seed=0xFEDCBA9876543210 + i, **own), i % 3, 40 + i)
        for i, (own, heat) in enumerate((own, heat) for own in filters for heat in heats)
    ]


@pytest.mark.parametrize(
    ("vocab", "spread", "dtype"), [(3, 2.0, torch.float16), (700, 4.0, torch.bfloat16), (1300, 1.0, torch.float32)]
)
def test_the_same_token_as_on_the_cpu(vocab, spread, dtype, device):
    generator = torch.Generator().manual_seed(vocab)
    draws = draws_of(FILTERS, [0.0, 0.6, 1.3])
    logits = (torch.randn(len(draws), vocab, generator=generator) * spread).to(dtype)
    assert drawn(logits, draws, device) == plain(logits, draws)


@pytest.mark.parametrize("heat", [1e-30, 1e-3, 0.7, 1.0, 50.0])
def test_without_filters_many_times(heat, device):
    """Positions at the ends of their range, seeds of either sign."""
    params = [SamplingParams(temperature=heat, seed=seed) for seed in (0, (1 << 64) - 1, 1 << 63)]
    draws = [Draw(own, k, position) for own in params for k in (0, 127) for position in (0, 2**31 - 1)]
    logits = torch.randn(len(draws), 1300, generator=torch.Generator().manual_seed(3)) * 5
    assert drawn(logits, draws, device) == plain(logits, draws)


def test_rows_do_not_influence_each_other(device):
    draws = draws_of(FILTERS[::2], [0.8])
    logits = torch.randn(1, 600, generator=torch.Generator().manual_seed(1)).expand(len(draws), -1) * 3
    together = drawn(logits, draws, device)
    assert [drawn(logits[:1], [each], device)[0] for each in draws] == together


def test_what_is_not_finite_is_impossible(device):
    logits = torch.randn(8, 600, generator=torch.Generator().manual_seed(2))
    logits[:, 300], logits[:, 5], logits[:, 7] = NAN, INF, -INF
    draws = draws_of([{}, {"top_k": 9}, {"top_p": 0.8}, {"min_p": 0.1}], [0.0, 0.7])
    assert drawn(logits, draws, device) == plain(logits, draws)
    assert greedy(logits, device) == plain(logits, [Draw(GREEDY, 0, 0)] * 8)


@pytest.mark.parametrize("value", [NAN, INF])
def test_where_none_is_finite_all_are_alike(value, device):
    logits = torch.full((3, 600), value)
    draws = draws_of([{}, {"top_p": 0.5}, {"top_k": 300}], [0.7])
    assert drawn(logits, draws, device) == plain(logits, draws)
    assert greedy(logits, device) == [0, 0, 0]


def test_no_token_where_none_may_be_drawn(device):
    draws = draws_of(FILTERS, [0.0, 0.7])
    logits = torch.full((len(draws), 600), -INF)
    assert drawn(logits, draws, device) == [NO_TOKEN] * len(draws)
    assert greedy(logits, device) == [NO_TOKEN] * len(draws)
    logits[:, 411] = -5.0  # the only one that rules left
    assert drawn(logits, draws, device) == [411] * len(draws)
    assert greedy(logits, device) == [411] * len(draws)


def test_no_rows(device):
    assert drawn(torch.empty(0, 600), [], device) == []
    assert greedy(torch.empty(0, 600), device) == []


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spread", [0.5, 3.0])
def test_large_vocabularies(spread, dtype, device):
    """Of hundreds of draws a few may differ: where two are nearly tied, or a token lies at the very edge of top-p."""
    filters = [*FILTERS, {"top_k": 50}, {"top_p": 0.999}, {"top_k": 1000}]
    draws = draws_of(filters, [0.0, *(0.5 + 0.05 * i for i in range(30))])
    logits = (torch.randn(len(draws), 128_256, generator=torch.Generator().manual_seed(4)) * spread).to(dtype)
    differ = sum(a != b for a, b in zip(drawn(logits, draws, device), plain(logits, draws), strict=True))
    assert differ <= 1
    assert greedy(logits, device) == plain(logits, [Draw(GREEDY, 0, 0)] * len(draws))


@pytest.mark.gpu
def test_more_than_two_to_the_31_logits(device):
    rows, vocab = 8400, 256_000
    logits = torch.zeros(rows, vocab, dtype=torch.bfloat16, device=device)
    wanted = torch.randint(vocab, (rows,), device=device)
    logits.scatter_(1, wanted[:, None], 40.0)
    out = torch.empty(rows, dtype=torch.int64, device=device)
    scratch = DrawScratch(rows, vocab, device)
    draw_greedy(logits, out, scratch)
    assert torch.equal(out, wanted)
    params = params_of([Draw(SamplingParams(temperature=1.0, top_p=0.9), 0, i) for i in range(rows)], device)
    draw(logits, params, out.zero_(), scratch)
    assert torch.equal(out, wanted)


@pytest.mark.gpu
def test_a_captured_graph_draws_by_the_parameters_of_its_replay(device):
    draws = draws_of(FILTERS, [0.0, 0.7])
    logits = torch.randn(len(draws), 32_000, device=device) * 3
    params, scratch = params_of(draws, device), scratch_of(logits)
    out = torch.empty(len(draws), dtype=torch.int64, device=device)
    draw(logits, params, out, scratch)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        draw(logits, params, out, scratch)
    params.position.add_(1)
    params.temperature.fill_(0.9)
    graph.replay()
    replayed = out.tolist()
    draw(logits, params, out, scratch)
    assert replayed == out.tolist()
