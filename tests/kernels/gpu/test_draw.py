"""The GPU's sampler draws what engine/sampler.py draws."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from twostroke.engine.request import SamplingParams
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


FILTERS = [
    {},
    {"top_k": 1},
    {"top_k": 2},
    {"top_k": 7},
    {"top_k": 300},
    {"top_p": 0.01},
    {"top_p": 0.5},
    {"top_p": 0.9},
    {"top_p": 0.999},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"top_k": 20, "top_p": 0.7},
    {"top_k": 5000, "top_p": 0.5, "min_p": 0.3},
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("vocab", "spread"), [(3, 2.0), (700, 4.0), (4999, 0.3), (2560, 3.0)])
def test_the_same_token_as_on_the_cpu(vocab, spread, dtype, device):
    generator = torch.Generator().manual_seed(vocab)
    draws = [
        Draw(SamplingParams(temperature=heat, seed=0xFEDCBA9876543210 + i, **filters), i % 3, 40 + i)
        for i, (filters, heat) in enumerate((f, t) for f in FILTERS for t in (0.0, 0.6, 1.3))
        if heat or i % 4 == 0
    ]
    logits = (torch.randn(len(draws), vocab, generator=generator) * spread).to(dtype)
    assert drawn(logits, draws, device) == plain(logits, draws)
