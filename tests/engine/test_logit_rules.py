"""Penalties, bias and bans of each row, as the sequences' tokens say; in batches that mix all of them."""

import importlib.util
import random
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from twostroke.engine.logit_rules import LogitRules, apply_rules_
from twostroke.engine.request import SamplingParams

VOCAB = 300
ENDS = frozenset({0, 2})


def _plain() -> ModuleType:
    spec = importlib.util.spec_from_file_location("plain_sampling", Path(__file__).parent / "plain_sampling.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


plain = _plain()

CONTROLS = [
    SamplingParams(repetition_penalty=1.7),
    SamplingParams(repetition_penalty=0.6, presence_penalty=-0.5),
    SamplingParams(presence_penalty=1.5),
    SamplingParams(frequency_penalty=0.75),
    SamplingParams(frequency_penalty=-0.5, presence_penalty=2.0, repetition_penalty=1.1),
    SamplingParams(logit_bias=((0, 5.0), (299, -1000.0), (17, 0.25))),
    SamplingParams(allowed_token_ids=(4, 4, 299, 0)),
    SamplingParams(banned_token_ids=(4, 5, 5)),
    SamplingParams(allowed_token_ids=(4, 5, 6), banned_token_ids=(4,), logit_bias=((5, 3.0),)),
    SamplingParams(bad_words=((7,), (1, 2), (3, 1, 2), (1, 1, 1, 9))),
    SamplingParams(min_tokens=4, stop_token_ids=(11, 12)),
    SamplingParams(min_tokens=4, stop_token_ids=(11, 2), ignore_eos=True),
    SamplingParams(min_tokens=100, bad_words=((1, 5),), repetition_penalty=2.0, banned_token_ids=(8,)),
]


def history(draw: random.Random) -> tuple[list[int], list[int]]:
    """A prompt and an output of few distinct tokens, so that everything occurs."""
    prompt = [draw.choice([1, 1, 2, 3, 50, draw.randrange(VOCAB)]) for _ in range(draw.randint(1, 40))]
    output = [draw.choice([1, 1, 2, 3, 60, draw.randrange(VOCAB)]) for _ in range(draw.choice([0, 0, 1, 3, 4, 30]))]
    return prompt, output


def rules_of(params: SamplingParams, prompt: list[int], output: list[int]) -> LogitRules:
    assert LogitRules.needed(params)
    rules = LogitRules(params, len(prompt))
    rules.update([*prompt, *output])
    return rules


def logits_of(rows: int, seed: int) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


@pytest.mark.parametrize("seed", range(12))
def test_a_batch_that_mixes_all_controls(seed: int) -> None:
    draw = random.Random(seed)
    chosen = draw.choices(CONTROLS, k=25)
    histories = [history(draw) for _ in chosen]
    logits = logits_of(len(chosen), seed)
    result = logits.clone()
    apply_rules_(result, [rules_of(p, *h) for p, h in zip(chosen, histories, strict=True)], ENDS)
    for row, got, params, (prompt, output) in zip(logits, result, chosen, histories, strict=True):
        expected = plain.plain_logits(row.numpy(), params, prompt, output, ENDS)
        np.testing.assert_allclose(got.numpy(), expected, rtol=1e-5, atol=1e-5)


def test_token_by_token_equals_all_at_once() -> None:
    """A sequence that grew, was replayed, or recomputed: the same state."""
    draw = random.Random(3)
    for params in CONTROLS:
        prompt, output = history(draw)
        output += [1, 3, 1, 2, 1, 1, 1]
        growing = LogitRules(params, len(prompt))
        tokens = list(prompt)
        logits = logits_of(1, 0)
        for token in [None, *output]:
            if token is not None:
                tokens.append(token)
            growing.update(tokens)
            growing.update(tokens)  # scheduled again after a preemption
            grown, fresh = logits.clone(), logits.clone()
            apply_rules_(grown, [growing], ENDS)
            apply_rules_(fresh, [rules_of(params, prompt, tokens[len(prompt) :])], ENDS)
            assert torch.equal(grown, fresh)


def test_what_changes_nothing_needs_no_rules() -> None:
    for params in (
        SamplingParams(),
        SamplingParams(temperature=0.5, top_k=3, top_p=0.5, min_p=0.1, typical_p=0.5, logprobs=3, prompt_logprobs=2),
        SamplingParams(stop_token_ids=(3,), ignore_eos=True),
    ):
        assert not LogitRules.needed(params)


def test_a_bad_word_may_begin_in_the_prompt() -> None:
    rules = rules_of(SamplingParams(bad_words=((5, 6, 7),)), [5], [6])
    assert list(rules.banned(())) == [7]
    rules.update([5, 6, 6])
    assert list(rules.banned(())) == []


def test_min_tokens_counts_output_only() -> None:
    params = SamplingParams(min_tokens=2, stop_token_ids=(9,))
    assert set(rules_of(params, [1] * 10, [4]).banned(ENDS)) == {0, 2, 9}
    assert list(rules_of(params, [1] * 10, [4, 4]).banned(ENDS)) == []


def test_a_frequency_of_many() -> None:
    rules = rules_of(SamplingParams(frequency_penalty=0.5), [7] * 9, [7] * 1000 + [8])
    assert dict(zip(rules.ids, rules.counts, strict=True)) == {7: 1000, 8: 1}
