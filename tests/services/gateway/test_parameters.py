"""Complete parameters: every field arrives, bad words become tokens, what does not fit the prompt is refused."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from twostroke.engine.request import Constraint, ConstraintKind, SamplingParams
from twostroke.errors import InvalidRequest
from twostroke.services.gateway.gateway import load_model
from twostroke.services.gateway.generation import GenerationRequest, Sampling, Stopping, TextInput
from twostroke.services.gateway.parameters import (
    MAX_PROMPT_ENTRIES,
    bad_word_tokens,
    check_prompt_logprobs,
    complete_params,
    request_field,
)
from twostroke.services.gateway.served_model import ServedModel
from twostroke.services.settings import GatewaySettings
from twostroke.v1 import inference_pb2 as pb


@pytest.fixture(scope="module")
def model(tiny_llama_dir: Path) -> ServedModel:
    """Context 2048."""
    return load_model(GatewaySettings(model=str(tiny_llama_dir)))


def ask(sampling: Sampling | None = None, stopping: Stopping | None = None, **fields: Any) -> GenerationRequest:
    return GenerationRequest(
        TextInput("hi"), sampling=sampling or Sampling(), stopping=stopping or Stopping(), **fields
    )


def field_of(request: GenerationRequest, model: ServedModel, prompt: int = 10) -> str | None:
    with pytest.raises(InvalidRequest) as caught:
        complete_params(request, prompt, model, 2048)
    return caught.value.field


def test_what_a_worker_refuses_has_the_caller_s_name() -> None:
    for field in [*(field.name for field in dataclasses.fields(SamplingParams)), "prompt_ids", "samples", "sampling"]:
        message: Any = pb.GenerateRequest.DESCRIPTOR
        for part in (request_field(field) or "").split("."):
            assert part in message.fields_by_name, field
            message = message.fields_by_name[part].message_type
    for field in ("", "peer", "request", "first", "output_ids"):
        assert request_field(field) is None


def test_every_field_arrives(model: ServedModel) -> None:
    sampling = Sampling(
        temperature=0.5,
        top_k=3,
        top_p=0.25,
        seed=9,
        min_p=0.1,
        typical_p=0.2,
        repetition_penalty=1.5,
        presence_penalty=0.3,
        frequency_penalty=0.4,
        logit_bias=((4, 1.0),),
        allowed_token_ids=(4, 5),
        banned_token_ids=(6,),
        bad_words=("x",),
        constraint=Constraint(ConstraintKind.REGEX, "a+"),
    )
    stopping = Stopping(max_tokens=20, token_ids=(7,), ignore_eos=True, min_tokens=3)
    params = complete_params(ask(sampling, stopping, logprobs=2, prompt_logprobs=1), 10, model, 2048)
    for field in dataclasses.fields(SamplingParams):
        assert getattr(params, field.name) != field.default, field.name
    for name in (
        "temperature",
        "top_k",
        "seed",
        "min_p",
        "typical_p",
        "repetition_penalty",
        "logit_bias",
        "constraint",
    ):
        assert getattr(params, name) == getattr(sampling, name)
    assert (params.presence_penalty, params.frequency_penalty, params.min_tokens) == (0.3, 0.4, 3)
    assert (params.allowed_token_ids, params.banned_token_ids, params.stop_token_ids) == ((4, 5), (6,), (7,))
    assert (params.logprobs, params.prompt_logprobs, params.max_tokens) == (2, 1, 20)


def test_defaults_change_nothing_and_a_seed_is_drawn(model: ServedModel) -> None:
    one, two = (complete_params(ask(), 10, model, 2048) for _ in range(2))
    assert one.seed != two.seed
    assert dataclasses.replace(one, seed=0) == SamplingParams(max_tokens=2038)


def test_bad_words_with_and_without_a_space(model: ServedModel) -> None:
    encode = model.tokenizer.encode
    assert bad_word_tokens(("the",), model) == (tuple(encode("the")), tuple(encode(" the")))
    assert len(encode(" the")) == 1, "one token in this vocabulary"
    assert bad_word_tokens((" the", "the"), model) == bad_word_tokens(("the",), model)
    assert bad_word_tokens((" ",), model) == (tuple(encode(" ")), tuple(encode("  ")))
    assert bad_word_tokens(("日本",), model)[0] == tuple(encode("日本"))


def test_an_unusable_bad_word_is_named(model: ServedModel) -> None:
    assert field_of(ask(Sampling(bad_words=("ok", "\ud800"))), model) == "sampling.bad_words[1]"


def test_bad_words_that_leave_nothing(model: ServedModel) -> None:
    (the,) = model.tokenizer.encode(" the")
    sampling = Sampling(allowed_token_ids=(the,), bad_words=("the",))
    assert field_of(ask(sampling), model) == "sampling.bad_words"
    complete_params(ask(dataclasses.replace(sampling, allowed_token_ids=(the, 9))), 10, model, 2048)


def test_min_tokens_after_the_prompt(model: ServedModel) -> None:
    assert field_of(ask(stopping=Stopping(min_tokens=49)), model, 2000) == "stopping.min_tokens"
    assert complete_params(ask(stopping=Stopping(min_tokens=48)), 2000, model, 2048).max_tokens == 48


def test_prompt_logprobs_are_bounded() -> None:
    check_prompt_logprobs(None, 10**9)
    check_prompt_logprobs(0, MAX_PROMPT_ENTRIES)
    check_prompt_logprobs(20, MAX_PROMPT_ENTRIES // 21)
    with pytest.raises(InvalidRequest) as caught:
        check_prompt_logprobs(20, MAX_PROMPT_ENTRIES // 21 + 1)
    assert caught.value.field == "prompt_logprobs"


def test_stop_texts_are_what_the_stream_leaves_out(model: ServedModel) -> None:
    a = model.tokenizer.encode("a")[0]
    request = GenerationRequest(None, stopping=Stopping(token_ids=(2, a)))
    assert model.stop_texts(request) == {2: "<|im_end|>", a: ""}
    assert model.stop_texts(dataclasses.replace(request, skip_special_tokens=False)) == {2: "", a: ""}
    assert model.stop_texts(dataclasses.replace(request, shown_tokens=("<|im_end|>", "none"))) == {2: "", a: ""}
