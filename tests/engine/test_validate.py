"""Every wrong field of a request is refused by name, before anything is spent on it."""

from dataclasses import replace
from math import inf, nan
from typing import Any

import pytest

from twostroke.engine.config import EngineOptions
from twostroke.engine.request import Request, SamplingParams, SequenceKey, Work
from twostroke.engine.validate import check_request, token_limit
from twostroke.errors import InvalidRequest

OPTIONS = EngineOptions(page_size=4, max_input=20, max_output=30)
KEY = SequenceKey(1, 1, 0, 0)


def check(request: Request, options: EngineOptions = OPTIONS, context: int = 40, pages: int = 10) -> None:
    check_request(request, options, context_length=context, vocab_size=100, usable_pages=pages)


def request_with(prompt: list[int] | None = None, output: list[int] | None = None, **params: Any) -> Request:
    return Request(KEY, [1, 2, 3] if prompt is None else prompt, SamplingParams(**params), output_ids=output or [])


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (request_with(prompt=[]), "prompt_ids"),
        (request_with(prompt=[1] * 21), "prompt_ids"),
        (request_with(prompt=[1] * 20, output=[1] * 20, max_tokens=30), "prompt_ids"),
        (request_with(prompt=[1, 100]), "prompt_ids"),
        (request_with(prompt=[-1]), "prompt_ids"),
        (request_with(output=[100]), "output_ids"),
        (request_with(output=[1, 2], max_tokens=2), "output_ids"),
        (request_with(max_tokens=0), "max_tokens"),
        (request_with(max_tokens=31), "max_tokens"),
        (request_with(temperature=nan), "temperature"),
        (request_with(temperature=inf), "temperature"),
        (request_with(temperature=-0.1), "temperature"),
        (request_with(top_p=0.0), "top_p"),
        (request_with(top_p=1.01), "top_p"),
        (request_with(top_p=nan), "top_p"),
        (request_with(top_k=-1), "top_k"),
        (request_with(seed=-1), "seed"),
        (request_with(seed=1 << 64), "seed"),
        (request_with(logprobs=-1), "logprobs"),
        (request_with(logprobs=21), "logprobs"),
        (request_with(stop_token_ids=(100,)), "stop_token_ids"),
        (request_with(stop_token_ids=(-1,)), "stop_token_ids"),
        (request_with(stop_token_ids=(1,) * 1025), "stop_token_ids"),
    ],
)
def test_names_the_wrong_field(request_: Request, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check(request_)
    assert caught.value.field == field


@pytest.mark.parametrize(
    "request_",
    [
        request_with(),
        request_with(prompt=[0, 99] * 10, max_tokens=30),
        request_with(output=[99], max_tokens=2),
        request_with(temperature=0.0, top_p=1.0, top_k=0, logprobs=0, seed=(1 << 64) - 1, stop_token_ids=(0, 99)),
        request_with(logprobs=20, max_tokens=30, top_k=10**9, top_p=1e-9, temperature=1e9),
    ],
)
def test_takes_what_is_right(request_: Request) -> None:
    check(request_)


def test_zero_limits_mean_the_context() -> None:
    options = EngineOptions(page_size=4)
    check(request_with(prompt=[1] * 39, max_tokens=1), options)
    check(request_with(max_tokens=10**6), options)
    with pytest.raises(InvalidRequest, match="no room"):
        check(request_with(prompt=[1] * 40), options)


def test_the_limit_is_the_smaller_of_context_and_max_tokens() -> None:
    assert token_limit(request_with(max_tokens=5), 40) == 8
    assert token_limit(request_with(max_tokens=50), 40) == 40
    assert token_limit(request_with(output=[1], max_tokens=5), 40) == 8, "output so far is counted in"


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "work", "pages"),
    [(4, 1, Work.ALL, 1), (4, 2, Work.ALL, 2), (5, 4, Work.ALL, 2), (8, 9, Work.DECODE, 4), (8, 9, Work.PREFILL, 2)],
)
def test_the_last_tokens_kv_is_never_needed(prompt: int, max_tokens: int, work: Work, pages: int) -> None:
    request = replace(request_with(prompt=[1] * prompt, max_tokens=max_tokens), work=work)
    check(request, pages=pages)
    with pytest.raises(InvalidRequest, match=f"needs {pages} KV pages, this engine has {pages - 1}"):
        check(request, pages=pages - 1)


def test_tells_whether_prompt_or_output_is_too_long_for_the_pool() -> None:
    for prompt, field in ((13, "prompt_ids"), (12, "max_tokens")):
        with pytest.raises(InvalidRequest) as caught:
            check(request_with(prompt=[1] * prompt, max_tokens=8), pages=3)
        assert caught.value.field == field
