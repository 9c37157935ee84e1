"""Every wrong sampling field is named by its path; everything at a bound passes."""

import dataclasses
import math
from typing import Any

import pytest

from twostroke.errors import InvalidRequest
from twostroke.services.gateway.generation import Sampling
from twostroke.services.gateway.sampling_checks import check_sampling

VOCAB = 300
NAN, INF = math.nan, math.inf

WRONG: list[tuple[dict[str, Any], str]] = [
    *[({"temperature": value}, "temperature") for value in (-0.1, 100.5, NAN, INF)],
    *[({"top_p": value}, "top_p") for value in (0.0, 1.01, NAN)],
    *[({"top_k": value}, "top_k") for value in (-1, 1 << 31)],
    *[({"seed": value}, "seed") for value in (-1, 1 << 64)],
    *[({"min_p": value}, "min_p") for value in (-0.1, 1.01, NAN)],
    *[({"typical_p": value}, "typical_p") for value in (0.0, 1.01, NAN)],
    *[({"repetition_penalty": value}, "repetition_penalty") for value in (0.0, -1.0, 101.0, NAN, INF)],
    *[({"presence_penalty": value}, "presence_penalty") for value in (-10.1, 10.1, NAN, -INF)],
    *[({"frequency_penalty": value}, "frequency_penalty") for value in (-10.1, 10.1, NAN, INF)],
    *[({"logit_bias": ((7, 1.0), (8, value))}, "logit_bias[8]") for value in (1000.5, -1000.5, NAN, INF)],
    ({"logit_bias": ((VOCAB, 1.0),)}, f"logit_bias[{VOCAB}]"),
    ({"logit_bias": ((1, 1.0),) * 1025}, "logit_bias"),
    ({"allowed_token_ids": (1, VOCAB)}, "allowed_token_ids[1]"),
    ({"allowed_token_ids": (1,) * 1025}, "allowed_token_ids"),
    ({"banned_token_ids": (VOCAB,)}, "banned_token_ids[0]"),
    ({"banned_token_ids": (1,) * 1025}, "banned_token_ids"),
    ({"allowed_token_ids": (4, 5), "banned_token_ids": (5, 4)}, "banned_token_ids"),
    ({"banned_token_ids": tuple(range(VOCAB))}, "banned_token_ids"),
    ({"bad_words": ("x",) * 65}, "bad_words"),
    ({"bad_words": ("x", "")}, "bad_words[1]"),
    ({"bad_words": ("x" * 257,)}, "bad_words[0]"),
]


@pytest.mark.parametrize(("fields", "path"), WRONG)
def test_the_field_is_named(fields: dict[str, Any], path: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_sampling(dataclasses.replace(Sampling(), **fields), VOCAB)
    assert caught.value.field == f"sampling.{path}"


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 0.0, "top_p": 1e-9, "top_k": (1 << 31) - 1, "seed": (1 << 64) - 1, "min_p": 1.0},
        {"temperature": 100.0, "typical_p": 1e-9, "repetition_penalty": 100.0, "presence_penalty": -10.0},
        {"frequency_penalty": 10.0, "logit_bias": ((0, 1000.0), (VOCAB - 1, -1000.0))},
        {"allowed_token_ids": (VOCAB - 1,) * 1024, "banned_token_ids": tuple(range(VOCAB - 1))},
        {"bad_words": ("x" * 256,) * 64},
    ],
)
def test_bounds_are_in(fields: dict[str, Any]) -> None:
    check_sampling(dataclasses.replace(Sampling(), **fields), VOCAB)
