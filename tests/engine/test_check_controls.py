"""Every wrong control is named by its field; everything at a bound passes."""

import math
from dataclasses import replace
from typing import Any

import pytest

from twostroke.engine.check_controls import check_controls, leaves_nothing
from twostroke.engine.request import SamplingParams
from twostroke.errors import InvalidRequest

VOCAB = 2000
BASE = SamplingParams(max_tokens=10)

WRONG: list[tuple[str, Any]] = [
    *[("min_p", value) for value in (-0.1, 1.1, math.nan, math.inf)],
    *[("typical_p", value) for value in (0.0, -1.0, 1.1, math.nan)],
    *[("repetition_penalty", value) for value in (0.0, -1.0, 100.5, math.nan, math.inf)],
    *[(field, value) for field in ("presence_penalty", "frequency_penalty") for value in (-10.5, 10.5, math.nan)],
    *[("logit_bias", ((3, value),)) for value in (1000.5, -1001.0, math.nan, math.inf)],
    ("logit_bias", ((VOCAB, 1.0),)),
    ("logit_bias", ((-1, 1.0),)),
    ("logit_bias", ((3, 1.0), (3, 2.0))),
    ("logit_bias", tuple((i, 1.0) for i in range(1025))),
    *[(field, ids) for field in ("allowed_token_ids", "banned_token_ids") for ids in ((VOCAB,), (5, -1), (1,) * 1025)],
    ("bad_words", ((),)),
    ("bad_words", ((1, VOCAB),)),
    ("bad_words", ((1,),) * 129),
    ("bad_words", ((1,) * 1101,)),
    ("min_tokens", -1),
    ("min_tokens", 11),
    ("prompt_logprobs", -1),
    ("prompt_logprobs", 21),
]


@pytest.mark.parametrize(("field", "value"), WRONG)
def test_the_field_is_named(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_controls(replace(BASE, **{field: value}), VOCAB)
    assert caught.value.field == field


@pytest.mark.parametrize(
    "params",
    [
        BASE,
        replace(BASE, min_p=1.0, typical_p=1e-9, repetition_penalty=1e-6, presence_penalty=-10.0),
        replace(BASE, repetition_penalty=100.0, frequency_penalty=10.0, min_tokens=10, prompt_logprobs=20),
        replace(BASE, logit_bias=((0, 1000.0), (VOCAB - 1, -1000.0)), allowed_token_ids=(3,) * 1024),
        replace(BASE, bad_words=((1,) * 1100,) * 128, banned_token_ids=(0, VOCAB - 1), prompt_logprobs=0),
        replace(BASE, allowed_token_ids=(1, 2), banned_token_ids=(1,), bad_words=((2, 2),)),
    ],
)
def test_bounds_are_in(params: SamplingParams) -> None:
    check_controls(params, VOCAB)


@pytest.mark.parametrize(
    ("allowed", "banned", "words"),
    [
        ((1, 2), (2, 1), ()),
        ((1, 2), (2,), ((1,),)),
        ((), range(5), ()),
        ((), (0, 1, 3, 4), ((2,),)),
        ((4,), (4, 4), ()),
    ],
)
def test_contradictions(allowed: tuple[int, ...], banned: tuple[int, ...], words: tuple[tuple[int, ...], ...]) -> None:
    assert leaves_nothing(allowed, banned, words, 5)
    assert not leaves_nothing(allowed, banned[:-1], [word for word in words if len(word) > 1], 5) or banned == (4, 4)
    params = replace(BASE, allowed_token_ids=tuple(allowed), banned_token_ids=tuple(banned), bad_words=words)
    with pytest.raises(InvalidRequest) as caught:
        check_controls(params, 5)
    assert caught.value.field == "allowed_token_ids"
