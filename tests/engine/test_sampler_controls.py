"""The complete sampling: each control's distribution by chi-square over fixed seeds, alone and in mixed batches."""

import importlib.util
import math
import random
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from twostroke.engine.logit_rules import LogitRules
from twostroke.engine.request import NO_TOKEN, SamplingParams
from twostroke.engine.sampler import Draw, sample

VOCAB = 40
ENDS = frozenset({0, 2})
DRAWS = 4000
GREEDY = SamplingParams(temperature=0.0)


def _plain() -> ModuleType:
    spec = importlib.util.spec_from_file_location("plain_sampling", Path(__file__).parent / "plain_sampling.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


plain = _plain()

PROMPT, OUTPUT = [3, 4, 5, 5, 2], [6, 3, 6, 6, 9]
CONTROLS = {
    "plain": SamplingParams(),
    "temperature": SamplingParams(temperature=1.7),
    "top-k": SamplingParams(top_k=7),
    "top-p": SamplingParams(top_p=0.8),
    "min-p": SamplingParams(min_p=0.08),
    "typical-p": SamplingParams(typical_p=0.6),
    "repetition": SamplingParams(repetition_penalty=1.8),
    "presence": SamplingParams(presence_penalty=1.2),
    "frequency": SamplingParams(frequency_penalty=0.7),
    "bias": SamplingParams(logit_bias=((1, 2.0), (9, -3.0))),
    "allowed": SamplingParams(allowed_token_ids=(1, 6, 9, 20)),
    "banned": SamplingParams(banned_token_ids=(1, 6, 9, 20)),
    "bad words": SamplingParams(bad_words=((9, 7), (6, 9, 8), (6, 8), (30,))),
    "min_tokens": SamplingParams(min_tokens=6, stop_token_ids=(7,)),
    "all filters": SamplingParams(temperature=1.3, top_k=25, top_p=0.95, min_p=0.02, typical_p=0.9),
    "everything": SamplingParams(
        temperature=0.9,
        top_k=20,
        top_p=0.95,
        min_p=0.01,
        typical_p=0.95,
        repetition_penalty=1.3,
        presence_penalty=0.4,
        frequency_penalty=0.3,
        logit_bias=((3, 1.5), (12, 4.0)),
        banned_token_ids=(11,),
        bad_words=((9, 12), (13,)),
        min_tokens=9,
        stop_token_ids=(7,),
    ),
}


def row_of(seed: int = 1, spread: float = 1.5) -> torch.Tensor:
    return torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(seed)) * spread


def draw_of(params: SamplingParams, position: int = 10, prompt: list[int] = PROMPT, output: list[int] = OUTPUT) -> Draw:
    if not LogitRules.needed(params):
        return Draw(params, 0, position)
    rules = LogitRules(params, len(prompt))
    rules.update([*prompt, *output])
    return Draw(params, 0, position, rules)


def chi_square(counts: np.ndarray, expected: np.ndarray) -> tuple[float, int]:
    """Rare tokens are counted together. Returns (statistic, degrees of freedom)."""
    common = expected >= 8
    counts = np.append(counts[common], counts[~common].sum())
    expected = np.append(expected[common], expected[~common].sum())
    used = expected > 0.5
    return float(((counts - expected)[used] ** 2 / expected[used]).sum()), int(used.sum()) - 1


@pytest.mark.parametrize("name", CONTROLS)
@pytest.mark.parametrize("seed", [11, 12345678901234567890])
def test_draws_follow_the_definition(name: str, seed: int) -> None:
    params = replace(CONTROLS[name], seed=seed)
    row = row_of()
    row[0, [0, 2, 3, 6, 7, 9]] += 2.0  # what the controls speak of is likely, so that they matter
    expected = plain.plain_distribution(row[0].numpy(), params, PROMPT, OUTPUT, ENDS)
    base = draw_of(params)
    draws = [base._replace(position=position) for position in range(DRAWS)]
    counts = np.bincount([t.token_id for t in sample(row.expand(DRAWS, -1), draws, ENDS)], minlength=VOCAB)
    assert not counts[expected == 0].any()
    statistic, freedom = chi_square(counts, expected * DRAWS)
    assert statistic < freedom + 4 * math.sqrt(2 * max(freedom, 1)) + 4, (statistic, freedom)
    if name != "plain":  # the test can tell: the plain distribution does not pass for this one
        plainly = plain.plain_distribution(row[0].numpy(), SamplingParams(), PROMPT, OUTPUT, ENDS)
        statistic, freedom = chi_square(counts, plainly * DRAWS)
        assert statistic > freedom + 8 * math.sqrt(2 * freedom)


@pytest.mark.parametrize("name", CONTROLS)
def test_greedy_is_the_highest_after_penalties_and_bans(name: str) -> None:
    params = replace(CONTROLS[name], temperature=0.0)
    for seed in range(20):
        row = row_of(seed)
        (token,) = sample(row, [draw_of(params)], ENDS)
        assert token.token_id == plain.plain_distribution(row[0].numpy(), params, PROMPT, OUTPUT, ENDS).argmax()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_row_of_a_mixed_batch_is_as_alone(dtype: torch.dtype) -> None:
    mixer = random.Random(0)
    vocab = 3001
    for round_ in range(6):
        draws = []
        for _ in range(20):
            params = mixer.choice(list(CONTROLS.values()))
            params = replace(
                params,
                temperature=mixer.choice([0.0, params.temperature]),
                seed=mixer.getrandbits(64),
                logprobs=mixer.choice([None, 0, 3]),
            )
            output = [mixer.randrange(20) for _ in range(mixer.randint(0, 9))]
            draws.append(draw_of(params, mixer.randrange(99), output=output))
        logits = (torch.randn(20, vocab, generator=torch.Generator().manual_seed(round_)) * 3).to(dtype)
        before = logits.clone()
        together = sample(logits, draws, ENDS)
        assert torch.equal(logits, before)
        assert together == [sample(logits[i : i + 1], [draws[i]], ENDS)[0] for i in range(20)]
        order = mixer.sample(range(20), 7)
        assert sample(logits[order], [draws[i] for i in order], ENDS) == [together[i] for i in order]


def test_log_probabilities_are_taken_before_everything() -> None:
    row = row_of()
    reference = row[0].double().log_softmax(dim=0)
    params = replace(CONTROLS["everything"], logprobs=3, seed=4)
    (token,) = sample(row, [draw_of(params)], ENDS)
    assert [i for i, _ in token.logprobs[1:]] == reference.argsort(descending=True)[:3].tolist()
    for i, value in token.logprobs:
        assert value == pytest.approx(reference[i].item(), abs=1e-5)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_without_anything_to_draw_harms_no_neighbour(temperature: float) -> None:
    base = SamplingParams(temperature=temperature, seed=3, logprobs=2)
    nothing = [
        replace(base, allowed_token_ids=(9,), bad_words=((9, 9),)),
        replace(base, allowed_token_ids=(0, 2), min_tokens=10),
        replace(base, banned_token_ids=tuple(range(VOCAB))),
    ]
    draws = [draw_of(nothing[0]), draw_of(base), draw_of(nothing[1]), draw_of(nothing[2]), draw_of(CONTROLS["bias"])]
    logits = torch.cat([row_of(i) for i in range(5)])
    result = sample(logits, draws, ENDS)
    assert [token.token_id == NO_TOKEN for token in result] == [True, False, True, True, False]
    assert result[0].logprobs == ()
    assert result[1] == sample(logits[1:2], [draws[1]], ENDS)[0]
    assert result[4] == sample(logits[4:5], [draws[4]], ENDS)[0]


def test_the_same_state_after_the_prompt_gives_each_sample_its_own_noise() -> None:
    """n samples of one prompt share one row of logits and one state of rules."""
    params = replace(CONTROLS["everything"], seed=8, temperature=5.0, top_k=0, top_p=1.0, typical_p=1.0, min_p=0.0)
    base = draw_of(params, output=[])
    row = torch.zeros(1, 5000)
    shared = sample(row.expand(6, -1), [base._replace(sample=i) for i in range(6)], ENDS)
    alone = [sample(row, [base._replace(sample=i)], ENDS)[0] for i in range(6)]
    assert shared == alone
    assert len({token.token_id for token in shared}) == 6


def test_typical_p_that_drops_the_likeliest_at_a_tiny_temperature() -> None:
    """The highest logit is no longer 0 after the filter, and lies far below: the draw still works."""
    logits = torch.full((1, 600), -1.0)
    logits[0, 7] = 0.0
    params = SamplingParams(temperature=0.18, typical_p=0.2, seed=1)
    tokens = {sample(logits, [Draw(params, 0, i)], ENDS)[0].token_id for i in range(50)}
    assert 7 not in tokens
    assert len(tokens) > 20


def test_extreme_penalties_and_biases() -> None:
    row = row_of()
    params = replace(
        GREEDY, repetition_penalty=100.0, presence_penalty=10.0, frequency_penalty=10.0, logit_bias=((3, 1000.0),)
    )
    assert sample(row, [draw_of(params)], ENDS)[0].token_id == 3
    params = replace(params, temperature=1e-30, seed=1)
    assert sample(row, [draw_of(params)], ENDS)[0].token_id == 3
    params = replace(params, temperature=1.0, logit_bias=tuple((i, -1000.0) for i in range(VOCAB) if i != 17))
    assert sample(row, [draw_of(params)], ENDS)[0].token_id == 17


def test_logits_that_are_not_finite_count_as_impossible() -> None:
    row = row_of()
    row[0, [3, 6]] = torch.tensor([float("nan"), float("inf")])
    params = replace(CONTROLS["everything"], seed=2, logit_bias=((5, 1.0),))
    seen = {sample(row, [draw_of(params, i)], ENDS)[0].token_id for i in range(300)}
    assert not seen & {3, 6, 11, 12, 13, 7, 0, 2, NO_TOKEN}
