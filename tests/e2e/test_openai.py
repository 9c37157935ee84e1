"""The unmodified OpenAI SDK against a stack of real processes: real text, log-probabilities, cancels, errors."""

import asyncio
import json
import math
import re
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from openai import AsyncOpenAI

from twostroke.v1 import inference_pb2 as pb

from .harness import Launch, Stack

ASK: list[Any] = [{"role": "user", "content": "Name three colours of the rainbow."}]
FLAGS = ("--disaggregate", "always", "--threads", "1", "--kv-memory", "128MiB")


def client(stack: Stack) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=stack.http + "/v1", api_key="none", max_retries=0, timeout=100)


async def native(stack: Stack, tokens: int) -> str:
    """What gRPC answers to the same chat."""
    chat = pb.Chat(messages=[pb.ChatMessage(role=turn["role"], content=turn["content"]) for turn in ASK])
    request = pb.GenerateRequest(
        input=pb.Input(chat=chat),
        sampling=pb.Sampling(temperature=0),
        stopping=pb.Stopping(max_tokens=tokens),
    )
    return (await stack.client.generate(request)).text


async def chats(stack: Stack, sdk: AsyncOpenAI) -> None:
    """A stream, a whole answer and the native API say the same."""
    asked: dict[str, Any] = {"model": "smollm2-135m", "messages": ASK, "temperature": 0, "max_completion_tokens": 24}
    whole = await sdk.chat.completions.create(**asked)
    text = whole.choices[0].message.content
    assert text
    assert len(text.split()) > 5
    assert text == await native(stack, 24)
    stream = await sdk.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    chunks = [chunk async for chunk in stream]
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == text
    assert len(chunks) > 10  # tokens come one by one
    usage, told = chunks[-1].usage, whole.usage
    assert usage is not None
    assert told is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (told.prompt_tokens, told.completion_tokens)


async def structured(sdk: AsyncOpenAI) -> None:
    """An answer of a schema, streamed, from token 0 on the prefill worker to the end on the other."""
    schema = {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 12},
            "tall": {"enum": ["ja", "日本 😀"]},
            "n": {"type": "integer"},
        },
        "required": ["city", "tall", "n"],
        "additionalProperties": False,
    }
    form: Any = {"type": "json_schema", "json_schema": {"name": "place", "strict": True, "schema": schema}}
    asked: dict[str, Any] = {"model": "smollm2-135m", "messages": ASK, "max_completion_tokens": 120, "n": 2, "seed": 7}
    whole = await sdk.chat.completions.create(**asked, response_format=form, temperature=1.3)
    for choice in whole.choices:
        assert choice.finish_reason == "stop"
        answer = json.loads(choice.message.content or "")
        assert answer.keys() == {"city", "tall", "n"}
        assert len(answer["city"]) <= 12
        assert answer["tall"] in ("ja", "日本 😀")
        assert type(answer["n"]) is int
    stream = await sdk.chat.completions.create(**asked, extra_body={"guided_regex": "[a-c]{3}-[0-9]{2}"}, stream=True)
    texts = ["", ""]
    async for chunk in stream:
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert all(re.fullmatch("[a-c]{3}-[0-9]{2}", text) for text in texts), texts
    with pytest.raises(openai.BadRequestError) as caught:
        await sdk.completions.create(model="smollm2-135m", prompt="x", extra_body={"guided_regex": "("})
    assert caught.value.param == "guided_regex"


async def scores(sdk: AsyncOpenAI) -> None:
    """A prompt's log-probabilities are the same whether it is echoed, told, or generated."""
    asked: dict[str, Any] = {"model": "smollm2-135m", "temperature": 0, "logprobs": 2}
    generated = (await sdk.completions.create(prompt="Once upon a time", max_tokens=4, **asked)).choices[0]
    assert generated.logprobs is not None
    prompt = "Once upon a time" + generated.text
    echoed = (await sdk.completions.create(prompt=prompt, max_tokens=0, echo=True, **asked)).choices[0]
    assert echoed.text == prompt
    assert echoed.logprobs is not None
    assert "".join(echoed.logprobs.tokens or []) == prompt
    values, wanted = echoed.logprobs.token_logprobs or [], generated.logprobs.token_logprobs or []
    assert values[0] is None
    assert all(math.isclose(a, b, abs_tol=0.1) for a, b in zip(values[-4:], wanted, strict=True))  # bfloat16
    more = {"prompt_logprobs": 1}
    told: Any = await sdk.completions.create(model="smollm2-135m", prompt=prompt, max_tokens=1, extra_body=more)
    entries = told.choices[0].prompt_logprobs
    assert entries[0] is None
    own = [next(iter(entry.values()))["logprob"] for entry in entries[1:]]
    assert all(math.isclose(a, b, abs_tol=0.1) for a, b in zip(own, values[1:], strict=True))


async def several(sdk: AsyncOpenAI) -> None:
    """Answers and prompts side by side; tokens as a prompt."""
    asked: dict[str, Any] = {"model": "smollm2-135m", "max_tokens": 6, "temperature": 0.8, "seed": 5, "n": 2}
    texts = ["Once upon a time", "The capital of Italy is"]
    both = await sdk.completions.create(prompt=texts, **asked)
    alone = [await sdk.completions.create(prompt=text, **asked) for text in texts]
    assert [choice.index for choice in both.choices] == [0, 1, 2, 3]
    assert len({choice.text for choice in both.choices}) > 2
    assert [len(answer.choices) for answer in alone] == [2, 2]
    async with httpx2.AsyncClient(base_url=str(sdk.base_url).removesuffix("/v1/"), trust_env=False) as http:
        ids = (await http.post("/tokenize", json={"prompt": texts[1]})).json()["tokens"]
        assert (await http.post("/detokenize", json={"tokens": ids})).json() == {"prompt": texts[1]}
        metrics = (await http.get("/metrics")).text
        assert 'twostroke_worker_pages{role="decode",worker="decode-0"}' in metrics
        assert "twostroke_time_to_first_token_seconds_count" in metrics
    greedy: dict[str, Any] = {"model": "smollm2-135m", "max_tokens": 6, "temperature": 0}
    by_ids, by_text = [await sdk.completions.create(prompt=prompt, **greedy) for prompt in (ids, texts[1])]
    assert by_ids.choices[0].text == by_text.choices[0].text


async def cancels(stack: Stack, sdk: AsyncOpenAI) -> None:
    """A client that leaves at any moment costs no page."""
    asked: dict[str, Any] = {
        "model": "smollm2-135m",
        "messages": ASK,
        "stream": True,
        "extra_body": {"ignore_eos": True},
    }
    for chunks in (1, 3, 8):
        stream = await sdk.chat.completions.create(**asked)
        seen = 0
        async for _ in stream:
            seen += 1
            if seen == chunks:
                break
        await stream.close()
    asked["messages"] = [{"role": "user", "content": "word " * 600}]
    call = asyncio.create_task(sdk.chat.completions.create(**asked))
    done, _ = await asyncio.wait([call], timeout=0.3)  # it is prefilling, or about to
    if not done:
        call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    await stack.whole()


async def errors(sdk: AsyncOpenAI) -> None:
    """Come as the SDK's own exceptions, and name what is wrong."""
    asked: dict[str, Any] = {"model": "smollm2-135m", "messages": ASK}
    with pytest.raises(openai.NotFoundError, match="'gpt-5' is not served here"):
        await sdk.chat.completions.create(**{**asked, "model": "gpt-5"})
    for more, param in (
        ({"top_p": 7}, "top_p"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"extra_body": {"temprature": 1}}, "temprature"),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            await sdk.chat.completions.create(**asked, **more)
        assert caught.value.param == param
    with pytest.raises(openai.BadRequestError) as caught:
        await sdk.chat.completions.create(**{**asked, "messages": [{"role": "user", "content": "word " * 20_000}]})
    assert caught.value.code == "context_length_exceeded"


async def test_the_sdk_against_real_processes(launch: Launch, smollm2_dir: Path) -> None:
    async with launch("--model", "smollm2-135m", *FLAGS) as stack, client(stack) as sdk:
        assert [model.id async for model in sdk.models.list()] == ["smollm2-135m"]
        await chats(stack, sdk)
        await errors(sdk)
        await structured(sdk)
        await cancels(stack, sdk)


@pytest.mark.slow
async def test_log_probabilities_and_several_prompts(launch: Launch, smollm2_dir: Path) -> None:
    async with launch("--model", "smollm2-135m", *FLAGS) as stack, client(stack) as sdk:
        await scores(sdk)
        await several(sdk)
        await stack.whole()
