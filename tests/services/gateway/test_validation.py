"""Every wrong field is named by its path; everything at a bound passes."""

import dataclasses
import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from twostroke.errors import InvalidRequest, ModelNotFound, TwostrokeError
from twostroke.services.gateway.gateway import load_model
from twostroke.services.gateway.generation import (
    ChatInput,
    GenerationRequest,
    Input,
    Sampling,
    Stopping,
    TextInput,
    TokenInput,
    Turn,
)
from twostroke.services.gateway.served_model import ServedModel
from twostroke.services.gateway.validation import check_length, clean_traceparent, output_limit, validate
from twostroke.services.settings import GatewaySettings


@pytest.fixture(scope="module")
def model(tiny_llama_dir: Path) -> ServedModel:
    """Context 2048, a chat template."""
    return load_model(GatewaySettings(model=str(tiny_llama_dir)))


def ask(source: Input | None = TextInput("hi"), **fields: Any) -> GenerationRequest:  # noqa: B008 - frozen
    return GenerationRequest(source, **fields)


LAST = 302  # the highest id of the tiny tokenizer is at least this

WRONG: list[tuple[GenerationRequest, str]] = [
    (ask(None), "input"),
    (ask(TextInput("")), "input.text"),
    (ask(TokenInput(())), "input.token_ids.ids"),
    (ask(TokenInput((1, 2, 1 << 31))), "input.token_ids.ids[2]"),
    (ask(TokenInput((1, -1))), "input.token_ids.ids[1]"),
    (ask(TokenInput((5,) * 2048)), "input.token_ids.ids"),
    (ask(ChatInput(())), "input.chat.messages"),
    (ask(ChatInput((Turn("user", "x"),) * 4097)), "input.chat.messages"),
    (ask(ChatInput((Turn("user", "x"), Turn("", "y")))), "input.chat.messages[1].role"),
    (ask(ChatInput((Turn("u" * 65, "x"),))), "input.chat.messages[0].role"),
    (ask(TextInput("x" * 10_000_000)), "input.text"),
    (ask(ChatInput((Turn("user", "x" * 10_000_000),))), "input.chat"),
    (ask(model="other"), "model"),
    (ask(sampling=Sampling(temperature=math.nan)), "sampling.temperature"),
    (ask(sampling=Sampling(temperature=math.inf)), "sampling.temperature"),
    (ask(sampling=Sampling(temperature=-0.1)), "sampling.temperature"),
    (ask(sampling=Sampling(temperature=100.5)), "sampling.temperature"),
    (ask(sampling=Sampling(top_p=0)), "sampling.top_p"),
    (ask(sampling=Sampling(top_p=1.01)), "sampling.top_p"),
    (ask(sampling=Sampling(top_p=math.nan)), "sampling.top_p"),
    (ask(sampling=Sampling(top_k=1 << 31)), "sampling.top_k"),
    (ask(sampling=Sampling(seed=1 << 64)), "sampling.seed"),
    (ask(logprobs=21), "logprobs"),
    (ask(stopping=Stopping(max_tokens=0)), "stopping.max_tokens"),
    (ask(stopping=Stopping(max_tokens=2048)), "stopping.max_tokens"),
    (ask(stopping=Stopping(strings=("x",) * 17)), "stopping.strings"),
    (ask(stopping=Stopping(strings=("x", ""))), "stopping.strings[1]"),
    (ask(stopping=Stopping(strings=("x" * 257,))), "stopping.strings[0]"),
    (ask(stopping=Stopping(token_ids=(1,) * 65)), "stopping.token_ids"),
    (ask(stopping=Stopping(token_ids=(1, 99_999))), "stopping.token_ids[1]"),
    (ask(request_id="x" * 129), "request_id"),
    (ask(request_id="a\nb"), "request_id"),
    (ask(request_id="é"), "request_id"),
]


@pytest.mark.parametrize(("request_", "field"), WRONG, ids=[f"{i}-{field}" for i, (_, field) in enumerate(WRONG)])
def test_wrong_fields_are_named(model: ServedModel, request_: GenerationRequest, field: str) -> None:
    with pytest.raises(TwostrokeError) as caught:
        validate(request_, model)
    assert caught.value.field == field
    assert isinstance(caught.value, ModelNotFound if field == "model" else InvalidRequest)
    assert len(caught.value.message) < 400


RIGHT = [
    ask(),
    ask(model="llama"),
    ask(TokenInput((0, LAST - 1))),
    ask(TokenInput((5,) * 2047)),
    ask(ChatInput((Turn("user", ""),))),
    ask(sampling=Sampling(temperature=0, top_p=1, top_k=(1 << 31) - 1, seed=(1 << 64) - 1)),
    ask(sampling=Sampling(temperature=100, top_p=1e-9)),
    ask(logprobs=0),
    ask(logprobs=20),
    ask(stopping=Stopping(max_tokens=1, strings=("x" * 256,) * 16, token_ids=(1,) * 64)),
    ask(stopping=Stopping(max_tokens=2047)),
    ask(request_id="x" * 128),
]


@pytest.mark.parametrize("request_", RIGHT, ids=range(len(RIGHT)))
def test_bounds_pass(model: ServedModel, request_: GenerationRequest) -> None:
    assert validate(request_, model) is request_.input


def test_a_model_without_a_template_takes_no_chat(model: ServedModel) -> None:
    class Plain:
        has_chat_template = False

    plain = dataclasses.replace(model, tokenizer=Plain())  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest) as caught:
        validate(ask(ChatInput((Turn("user", "x"),))), plain)
    assert caught.value.field == "input.chat"


@pytest.mark.parametrize(
    ("prompt", "asked", "most", "expected"),
    [
        (10, None, 5000, 2038),
        (10, 2038, 5000, 2038),
        (10, 2039, 5000, "stopping.max_tokens"),
        (2047, None, 5000, 1),
        (2048, None, 5000, "input"),
        (10, None, 100, 90),
        (10, 91, 100, "stopping.max_tokens"),
        (100, None, 100, "input"),
        (10, 5, 100, 5),
    ],
)
def test_output_limit(model: ServedModel, prompt: int, asked: int | None, most: int, expected: int | str) -> None:
    if isinstance(expected, int):
        assert output_limit(prompt, asked, model, most) == expected
        return
    with pytest.raises(InvalidRequest) as caught:
        output_limit(prompt, asked, model, most)
    assert caught.value.field == expected


def test_output_limit_of_the_deployment(model: ServedModel) -> None:
    assert output_limit(10, None, dataclasses.replace(model, max_output=64), 5000) == 64


def test_check_length(model: ServedModel) -> None:
    small = dataclasses.replace(model, max_input=100)
    check_length(100, small)
    with pytest.raises(InvalidRequest, match="at most 100"):
        check_length(101, small)


@pytest.mark.parametrize(
    ("value", "valid"),
    [
        ("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", True),
        ("cc-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00", True),
        ("ff-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", False),
        ("00-00000000000000000000000000000000-b7ad6b7169203331-01", False),
        ("00-0af7651916cd43dd8448eb211c80319c-0000000000000000-01", False),
        ("00-0AF7651916CD43DD8448EB211C80319C-b7ad6b7169203331-01", False),
        ("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331", False),
        ("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01\n", False),
        ("", False),
    ],
)
def test_traceparent(value: str, valid: bool) -> None:
    assert clean_traceparent(value) == (value if valid else "")


async def test_long_texts_are_tokenized_on_a_thread(model: ServedModel) -> None:
    text = "the cat and the " * 200
    assert await model.prompt_ids(TextInput(text)) == model.tokenizer.encode(text)
    chat = ChatInput((Turn("user", text),))
    assert await model.prompt_ids(chat) == model.tokenizer.encode_chat([{"role": "user", "content": text}])
    busy = dataclasses.replace(model, threads=ThreadPoolExecutor(1))
    busy.threads.shutdown()
    assert await busy.prompt_ids(TextInput("short")) == model.tokenizer.encode("short")
    with pytest.raises(RuntimeError):  # a thread was wanted
        await busy.prompt_ids(TextInput(text))


async def test_an_input_without_tokens_is_refused(model: ServedModel) -> None:
    class Silent:
        def encode(self, text: str) -> list[int]:
            return []

    with pytest.raises(InvalidRequest, match="no tokens"):
        await dataclasses.replace(model, tokenizer=Silent()).prompt_ids(TextInput("x"))  # type: ignore[arg-type]
