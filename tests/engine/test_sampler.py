import math
from dataclasses import replace

import pytest
import torch

from twostroke.engine.request import SamplingParams
from twostroke.engine.sampler import Draw, sample

GREEDY = SamplingParams(temperature=0.0)
NAN, INF = float("nan"), float("inf")


def logits_of(rows: int, vocab: int = 1000, seed: int = 0, spread: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * spread


def ids(logits: torch.Tensor, draws: list[Draw]) -> list[int]:
    return [token.token_id for token in sample(logits, draws)]


def frequencies(row: torch.Tensor, params: SamplingParams, draws: int = 3000) -> torch.Tensor:
    tokens = ids(row.expand(draws, -1), [Draw(params, 0, position) for position in range(draws)])
    return torch.bincount(torch.tensor(tokens), minlength=row.shape[-1]) / draws


def check_distribution(row: torch.Tensor, params: SamplingParams, expected: torch.Tensor, draws: int = 3000) -> None:
    seen = frequencies(row, params, draws)
    assert not bool((seen[expected == 0] > 0).any())
    error = (expected * (1 - expected) / draws).sqrt()
    assert bool(((seen - expected).abs() <= 4.5 * error + 1e-9).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_greedy_takes_the_highest(dtype):
    logits = logits_of(7).to(dtype)
    assert ids(logits, [Draw(GREEDY, 0, 5)] * 7) == logits.float().argmax(dim=1).tolist()


def test_nothing_to_draw():
    assert sample(torch.empty(0, 10), []) == []


def test_temperature_scales_the_distribution():
    row = torch.tensor([[2.0, 1.0, 0.0, -1.0, 0.5]])
    for temperature in (0.3, 1.0, 4.0):
        params = SamplingParams(temperature=temperature, seed=11)
        check_distribution(row, params, (row[0] / temperature).softmax(0))


def test_top_k_then_top_p_after_temperature():
    row = torch.tensor([[3.0, 2.5, 2.0, 1.0, 0.0, -1.0]])
    p = (row[0] / 2.0).softmax(0)
    top3 = torch.cat((p[:3], torch.zeros(3)))
    check_distribution(row, SamplingParams(temperature=2.0, top_k=3, seed=1), top3 / top3.sum())
    # Shares of what top-k kept: 0.42, 0.33, 0.25. The first alone reaches 0.4; the first two reach 0.7.
    check_distribution(row, SamplingParams(temperature=2.0, top_k=3, top_p=0.4, seed=2), torch.eye(6)[0])
    top2 = torch.cat((p[:2], torch.zeros(4)))
    check_distribution(row, SamplingParams(temperature=2.0, top_k=3, top_p=0.7, seed=3), top2 / top2.sum())
    # Of the whole distribution 0.7 takes three.
    check_distribution(row, SamplingParams(temperature=2.0, top_p=0.7, seed=4), top3 / top3.sum())


def test_top_k_of_one_and_a_tiny_temperature_are_greedy():
    logits = logits_of(20)
    best = logits.argmax(dim=1).tolist()
    for params in (SamplingParams(top_k=1), SamplingParams(temperature=1e-30), SamplingParams(top_p=1e-9)):
        assert ids(logits, [Draw(params, 0, i) for i in range(20)]) == best


def test_a_row_is_the_same_alone_and_in_any_batch():
    logits = logits_of(12, vocab=3000)
    kinds = [
        GREEDY,
        SamplingParams(seed=1),
        SamplingParams(temperature=0.7, top_k=5, seed=2),
        SamplingParams(top_p=0.8, seed=3),
    ]
    draws = [Draw(replace(kinds[i % 4], logprobs=i % 3 or None), i % 2, 10 + i) for i in range(12)]
    together = sample(logits, draws)
    for i in range(12):
        assert sample(logits[i : i + 1], [draws[i]])[0].token_id == together[i].token_id
    order = [5, 0, 11, 3, 7]
    assert ids(logits[order], [draws[i] for i in order]) == [together[i].token_id for i in order]


def test_seed_sample_and_position_each_change_the_draw():
    row = torch.zeros(1, 50_000)
    base = Draw(SamplingParams(seed=5), 0, 100)
    others = [
        base._replace(params=SamplingParams(seed=6)),
        base._replace(params=SamplingParams(seed=5 + (1 << 40))),
        base._replace(params=SamplingParams(seed=(1 << 64) - 1)),
        base._replace(sample=1),
        base._replace(position=101),
    ]
    assert len(set(ids(row.expand(6, -1), [base, *others]))) == 6
    assert ids(row, [base]) == ids(row, [base])


def test_logprobs_are_of_the_raw_logits():
    logits = logits_of(3, vocab=300)
    reference = logits.double().log_softmax(dim=1)
    draws = [
        Draw(SamplingParams(temperature=0.5, top_k=2, logprobs=4, seed=3), 0, 1),
        Draw(GREEDY, 0, 1),
        Draw(SamplingParams(temperature=0.0, logprobs=0), 0, 1),
    ]
    first, second, third = sample(logits, draws)
    assert second.logprobs == ()
    assert third.logprobs == ((third.token_id, pytest.approx(reference[2, third.token_id].item(), abs=1e-5)),)
    assert len(first.logprobs) == 5
    assert first.logprobs[0][0] == first.token_id
    assert [token for token, _ in first.logprobs[1:]] == reference[0].argsort(descending=True)[:4].tolist()
    for token, logprob in first.logprobs:
        assert logprob == pytest.approx(reference[0, token].item(), abs=1e-5)


def test_more_logprobs_than_tokens():
    (token,) = sample(logits_of(1, vocab=3), [Draw(SamplingParams(temperature=0.0, logprobs=20), 0, 1)])
    assert len(token.logprobs) == 4
    assert math.fsum(math.exp(p) for _, p in token.logprobs[1:]) == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(seed=1), SamplingParams(seed=1, top_k=9, top_p=0.9)])
def test_what_is_not_finite_counts_as_impossible_and_harms_no_neighbour(params):
    params = replace(params, logprobs=2)
    logits = logits_of(5, vocab=400)
    draws = [Draw(params, 0, 7 + i) for i in range(5)]
    clean = sample(logits, draws)
    broken = logits.clone()
    broken[0, 3] = NAN
    broken[1, 9] = INF
    broken[2] = NAN
    broken[3, 1:] = -INF
    result = sample(broken, draws)
    assert result[4].token_id == clean[4].token_id
    assert result[0].token_id != 3
    assert result[1].token_id != 9
    assert result[3].token_id == 0
    for token in result:
        assert 0 <= token.token_id < 400
        assert all(math.isfinite(p) for _, p in token.logprobs)


def test_minus_infinity_excludes_without_any_fuss():
    logits = torch.full((2, 600), -INF)
    logits[:, [5, 300]] = 1.0
    assert set(ids(logits.repeat(100, 1), [Draw(SamplingParams(seed=i), 0, 1) for i in range(200)])) == {5, 300}
    assert ids(logits, [Draw(GREEDY, 0, 1)] * 2) == [5, 5]


def test_the_input_is_not_overwritten():
    logits = logits_of(4)
    before = logits.clone()
    sample(logits, [Draw(SamplingParams(seed=i, top_k=i, top_p=0.9), 0, 1) for i in range(4)])
    assert torch.equal(logits, before)
