"""`/v1/chat/completions` through a real gateway and stand-in workers."""

import json
from pathlib import Path
from typing import Any

from twostroke.services.gateway.http.chat_fields import ChatFields
from twostroke.services.gateway.http.completion_fields import CompletionFields

from ...http_client import USER, served
from ...stand_in_worker import EOS
from .test_completions import ANSWER, text_of, workers

PATH = "/v1/chat/completions"


async def test_a_chat(tiny_llama_dir: Path) -> None:
    async with served(tiny_llama_dir, *workers()) as it:
        told = (await it.post(PATH, {"messages": USER}, x_request_id="c1")).json()
        assert (told["id"], told["object"], told["model"]) == ("chatcmpl-c1", "chat.completion", "llama")
        message = {"role": "assistant", "content": text_of(it, ANSWER[:-1]), "refusal": None}
        assert told["choices"] == [
            {"index": 0, "message": message, "logprobs": None, "finish_reason": "stop", "stop_reason": None}
        ]
        tokenizer = it.it.gateway.lifecycle.model.tokenizer
        ids = tokenizer.encode_chat(USER)
        assert told["usage"]["prompt_tokens"] == len(ids)
        (submit,) = it.it.worker("d0").submits
        assert list(submit.prompt_ids) == ids
        assert submit.params.max_tokens == 2048 - len(ids)  # all that fit


async def test_the_order_of_a_stream(tiny_llama_dir: Path) -> None:
    async with served(tiny_llama_dir, *workers()) as it:
        body = {"messages": USER, "max_completion_tokens": 5, "stream_options": {"include_usage": True}}
        events = await it.events(PATH, body)
        assert {event["object"] for event in events} == {"chat.completion.chunk"}
        assert len({json.dumps({**event, "choices": 0, "usage": 0}) for event in events}) == 1
        first, *middle, end, usage = events
        assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert all(set(event["choices"][0]["delta"]) == {"content"} for event in middle)
        assert "".join(event["choices"][0]["delta"]["content"] for event in middle) == text_of(it, ANSWER[:5])
        assert (end["choices"][0]["delta"], end["choices"][0]["finish_reason"]) == ({}, "length")
        assert all(event["choices"][0]["finish_reason"] is None for event in [first, *middle])
        assert usage["choices"] == []
        assert usage["usage"]["completion_tokens"] == 5
        assert all(event["usage"] is None for event in events[:-1])
        assert "usage" not in (await it.events(PATH, {"messages": USER}))[0]


async def test_the_sdk_s_own_helpers(tiny_llama_dir: Path) -> None:
    """Its accumulator takes our chunks for OpenAI's."""
    async with served(tiny_llama_dir, *workers()) as it:
        async with it.sdk.chat.completions.stream(model="llama", messages=USER, n=2, logprobs=True) as stream:
            async for _ in stream:
                pass
            answer = await stream.get_final_completion()
        for index, choice in enumerate(answer.choices):
            shifted = [token + 40 * index for token in ANSWER[:-1]]
            assert choice.message.content == text_of(it, shifted)
            assert choice.logprobs is not None
            assert [entry.token for entry in choice.logprobs.content or []][:-1] == [text_of(it, [t]) for t in shifted]
            assert choice.finish_reason == "stop"


async def test_logprobs(tiny_llama_dir: Path) -> None:
    async with served(tiny_llama_dir, *workers()) as it:
        body = {"messages": USER, "max_tokens": 2, "logprobs": True, "top_logprobs": 1}
        told = (await it.post(PATH, body)).json()["choices"][0]["logprobs"]
        name, other = text_of(it, [10]), text_of(it, [0])
        assert told["refusal"] is None
        assert told["content"][0] == {
            "token": name,
            "logprob": -0.5,
            "bytes": list(name.encode()),
            "top_logprobs": [{"token": other, "logprob": -1.0, "bytes": list(other.encode())}],
        }
        assert len(told["content"]) == 2
        events = await it.events(PATH, body)
        streamed = [
            entry
            for event in events
            for entry in (event["choices"][0]["logprobs"] or {"content": []})["content"]
        ]  # fmt: skip
        assert streamed == told["content"]
        body = {"messages": USER, "max_tokens": 1, "logprobs": True, "return_tokens_as_token_ids": True}
        (entry,) = (await it.post(PATH, body)).json()["choices"][0]["logprobs"]["content"]
        assert (entry["token"], entry["top_logprobs"]) == ("token_id:10", [])


async def test_token_ids(tiny_llama_dir: Path) -> None:
    async with served(tiny_llama_dir, *workers()) as it:
        body = {"messages": USER, "return_token_ids": True}
        told = (await it.post(PATH, body)).json()
        ids = it.it.gateway.lifecycle.model.tokenizer.encode_chat(USER)
        assert (told["prompt_token_ids"], told["choices"][0]["token_ids"]) == (ids, ANSWER)
        events = await it.events(PATH, body)
        assert events[0]["choices"][0]["prompt_token_ids"] == ids
        assert [t for event in events for t in event["choices"][0].get("token_ids", [])] == ANSWER
        assert all(list(submit.prompt_ids) == ids for submit in it.it.worker("d0").submits)


async def test_stop_reasons(tiny_llama_dir: Path) -> None:
    async with served(tiny_llama_dir, *workers()) as it:
        string = text_of(it, [15, 16])
        told = (await it.post(PATH, {"messages": USER, "stop": string})).json()["choices"][0]
        assert (told["message"]["content"], told["stop_reason"]) == (text_of(it, ANSWER[:5]), string)
        events = await it.events(PATH, {"messages": USER, "stop_token_ids": [EOS]})
        assert events[-1]["choices"][0]["stop_reason"] == EOS


async def test_what_is_wrong_is_named_by_the_api_s_name(tiny_llama_dir: Path) -> None:
    async with served(tiny_llama_dir, *workers()) as it:
        cases: list[tuple[dict[str, Any], str]] = [
            ({"max_completion_tokens": 0}, "max_completion_tokens"),
            ({"max_tokens": 0}, "max_tokens"),
            ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
            ({"messages": []}, "messages"),
            ({"messages": [*USER, {"role": "", "content": "x"}]}, "messages[1].role"),
            ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
            ({"tools": [{"type": "function"}]}, "tools[0].function"),
            ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
            ({"n": 17}, "n"),
            ({"echo": True}, "echo"),
        ]
        for more, param in cases:
            status, error = await it.refused(PATH, {"messages": USER, **more})
            assert (status, error["param"]) == (400, param)
        long = [{"role": "user", "content": "x" * 3000}]
        status, error = await it.refused(PATH, {"messages": long})
        assert (status, error["code"], error["param"]) == (400, "context_length_exceeded", "messages")
        assert not it.it.worker("d0").submits


def test_what_completions_take_chats_take_too() -> None:
    alone = set(CompletionFields.model_fields) - set(ChatFields.model_fields) - set(ChatFields.unsupported)
    assert alone == {"prompt", "suffix"}
