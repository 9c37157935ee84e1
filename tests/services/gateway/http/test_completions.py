"""`/v1/completions` through a real gateway and stand-in workers."""

import json
from pathlib import Path
from typing import Any

import pytest

from twostroke.services.gateway.http.completion_fields import CompletionFields
from twostroke.services.gateway.http.constraint_fields import ConstraintFields
from twostroke.v1 import worker_pb2 as wpb

from ....tiny import make_tiny_llama
from ...http_client import Served, served
from ...stand_in_worker import EOS, Script, StandIn

PATH = "/v1/completions"
ANSWER = [*range(10, 40), EOS]


def workers(**script: Any) -> tuple[StandIn, StandIn]:
    return StandIn("prefill", "p0", Script(**script)), StandIn("decode", "d0", Script(**script))


def text_of(it: Served, tokens: list[int]) -> str:
    return "".join(it.it.gateway.lifecycle.model.tokenizer.token_text(token) for token in tokens)


async def test_a_completion(tiny_llama_dir: Path) -> None:
    async with served(tiny_llama_dir, *workers()) as it:
        response = await it.post(PATH, {"prompt": "hello", "max_tokens": 50}, x_request_id="mine-1")
        assert response.headers["x-request-id"] == "mine-1"
        assert response.headers["content-type"] == "application/json"
        assert response.headers["date"]
        told = response.json()
        assert (told["id"], told["object"], told["model"]) == ("cmpl-mine-1", "text_completion", "llama")
        assert told["choices"] == [
            {
                "index": 0,
                "text": text_of(it, ANSWER[:-1]),
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
            }
        ]
        assert told["usage"] == {
            "prompt_tokens": 5,
            "completion_tokens": 31,
            "total_tokens": 36,
            "prompt_tokens_details": {"cached_tokens": 5},
        }


async def test_the_default_is_16_tokens(tiny_llama_dir: Path) -> None:
    async with served(tiny_llama_dir, *workers()) as it:
        answer = await it.sdk.completions.create(model="llama", prompt="hello")
        assert answer.usage is not None
        assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (16, "length")


async def test_a_stream_says_the_same(tiny_llama_dir: Path) -> None:
    async with served(tiny_llama_dir, *workers()) as it:
        body = {"prompt": "hello", "max_tokens": 50, "logprobs": 2, "return_token_ids": True}
        whole = (await it.post(PATH, body)).json()["choices"][0]
        events = await it.events(PATH, {**body, "stream_options": {"include_usage": True}})
        *chunks, usage = events
        assert usage["choices"] == []
        assert usage["usage"]["completion_tokens"] == 31
        assert all(chunk["usage"] is None for chunk in chunks)
        assert len({json.dumps({**chunk, "choices": 0, "usage": 0}) for chunk in events}) == 1
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
        assert "".join(choice["text"] for choice in choices) == whole["text"]
        assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["stop"]
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            assert [x for choice in choices for x in choice["logprobs"][name]] == whole["logprobs"][name]
        assert [x for choice in choices for x in choice["token_ids"]] == whole["token_ids"] == ANSWER
        assert [choice.get("prompt_token_ids") for choice in choices] == [
            whole["prompt_token_ids"], *[None] * (len(choices) - 1),
        ]  # fmt: skip
        assert "usage" not in (await it.events(PATH, body))[-1]


async def test_a_token_a_chunk_while_the_client_keeps_up(tiny_llama_dir: Path) -> None:
    async with served(tiny_llama_dir, *workers(pause_s=0.02)) as it:
        stream = await it.sdk.completions.create(model="llama", prompt="hello", max_tokens=8, stream=True)
        texts = [chunk.choices[0].text async for chunk in stream]
        assert len(texts) == 8
        assert "".join(texts) == text_of(it, ANSWER[:8])


async def test_several_prompts_and_answers(tiny_llama_dir: Path) -> None:
    async with served(tiny_llama_dir, *workers()) as it:
        body = {"prompt": ["hello", [5, 6, 7]], "n": 2, "max_tokens": 4}
        told = (await it.post(PATH, body, x_request_id="r")).json()
        assert [choice["index"] for choice in told["choices"]] == [0, 1, 2, 3]
        first, second = text_of(it, ANSWER[:4]), text_of(it, [token + 40 for token in ANSWER[:4]])
        assert [choice["text"] for choice in told["choices"]] == [first, second, first, second]
        assert told["usage"]["prompt_tokens"] == 8
        assert told["usage"]["completion_tokens"] == 16
        events = await it.events(PATH, body)
        for index, text in enumerate([first, second, first, second]):
            mine = [c for event in events for c in event["choices"] if c["index"] == index]
            assert "".join(choice["text"] for choice in mine) == text
            assert [choice["finish_reason"] for choice in mine].count("length") == 1
        prompts = {tuple(submit.prompt_ids) for submit in it.it.worker("d0").submits}
        assert (5, 6, 7) in prompts
        assert len(prompts) == 2


async def test_echo(tiny_llama_dir: Path) -> None:
    async with served(tiny_llama_dir, *workers()) as it:
        said = text_of(it, ANSWER[:3])
        for prompt, text in (("hello", "hello"), ([10, 11], text_of(it, [10, 11]))):
            body = {"prompt": prompt, "echo": True, "max_tokens": 3}
            told = (await it.post(PATH, body)).json()
            assert told["choices"][0]["text"] == text + said
            events = await it.events(PATH, body)
            assert "".join(event["choices"][0]["text"] for event in events) == text + said
        body = {"prompt": "hello", "echo": True, "max_tokens": 0}
        told = (await it.post(PATH, body)).json()
        assert (told["choices"][0]["text"], told["usage"]["completion_tokens"]) == ("hello", 0)
        events = await it.events(PATH, body)
        assert [event["choices"][0]["text"] for event in events] == ["hello"]
        assert (await it.refused(PATH, {"prompt": "hello", "max_tokens": 0}))[1]["param"] == "max_tokens"


async def test_stop_strings_and_tokens(tiny_llama_dir: Path) -> None:
    async with served(tiny_llama_dir, *workers()) as it:
        string = text_of(it, [15, 16])
        told = (await it.post(PATH, {"prompt": "x", "max_tokens": 50, "stop": string})).json()["choices"][0]
        assert (told["text"], told["finish_reason"], told["stop_reason"]) == (text_of(it, ANSWER[:5]), "stop", string)
        body = {"prompt": "x", "max_tokens": 50, "stop": [string], "include_stop_str_in_output": True}
        events = await it.events(PATH, body)
        assert "".join(event["choices"][0]["text"] for event in events) == text_of(it, ANSWER[:7])
        assert events[-1]["choices"][0]["stop_reason"] == string
        # The stand-in's end is this token, so it stands for one that was asked for.
        told = (await it.post(PATH, {"prompt": "x", "max_tokens": 50, "stop_token_ids": [EOS]})).json()["choices"][0]
        assert told["stop_reason"] == EOS


async def test_everything_reaches_the_workers(tiny_llama_dir: Path) -> None:
    async with served(tiny_llama_dir, *workers()) as it:
        body = {
            "model": "llama", "prompt": [5, 1, 2, 3], "max_tokens": 9, "temperature": 0.5, "top_p": 0.25, "top_k": 3,
            "min_p": 0.125, "typical_p": 0.75, "repetition_penalty": 1.5, "presence_penalty": -1,
            "frequency_penalty": 2, "seed": -1,
            "logit_bias": {"7": 5}, "allowed_token_ids": [7, 8, 9], "banned_token_ids": [9],
            "bad_words": ["ab"], "stop_token_ids": [8], "ignore_eos": True, "min_tokens": 2, "logprobs": 4,
            "cache_salt": "salt", "user": "u", "safety_identifier": "s", "prompt_cache_key": "k", "best_of": 1,
            "add_special_tokens": False, "skip_special_tokens": False, "truncate_prompt_tokens": 3,
            "priority": -3,
        }  # fmt: skip
        trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
        response = await it.post(PATH, body, traceparent=trace)
        assert response.status_code == 200, response.text
        (submit,) = it.it.worker("d0").submits
        assert list(submit.prompt_ids) == [1, 2, 3]
        assert (submit.cache_salt, submit.traceparent, submit.priority) == (b"salt", trace, -3)
        encode = it.it.gateway.lifecycle.model.tokenizer.encode_plain
        assert submit.params == wpb.SamplingParams(
            temperature=0.5, top_k=3, top_p=0.25, seed=(1 << 64) - 1, max_tokens=9, stop_token_ids=[8], ignore_eos=True,
            logprobs=4, min_p=0.125, typical_p=0.75, repetition_penalty=1.5, presence_penalty=-1, frequency_penalty=2,
            bias_ids=[7], bias_values=[5], allowed_ids=[7, 8, 9], banned_ids=[9],
            bad_words=[wpb.TokenSequence(ids=encode(word)) for word in ("ab", " ab")], min_tokens=2,
        )  # fmt: skip
        not_sent = set(CompletionFields.model_fields) - set(ConstraintFields.model_fields) - set(body) - {
            "n", "stream", "stream_options", "echo", "suffix", "stop", "include_stop_str_in_output", "prompt_logprobs",
            "return_token_ids", "return_tokens_as_token_ids",
        }  # fmt: skip
        assert not not_sent, "a field that no test of this file sends"


async def test_special_tokens(tiny_llama_dir: Path) -> None:
    """In the text, in the echo and in places of tokens, where they are asked for; never the one that ends it."""
    async with served(tiny_llama_dir, *workers(tokens=[10, 1, 11])) as it:
        body = {"prompt": [50, 2, 51], "echo": True, "return_token_ids": True, "stop_token_ids": [EOS]}
        parts = [text_of(it, [token]) for token in (50, 2, 51, 10, 1, 11)]
        for skip, more in ((True, 0), (False, 0), (False, 1)):
            wanted = [part for part in parts if not (skip and part.startswith("<|"))] + ["<|im_end|>"] * more
            sent = {**body, "skip_special_tokens": skip, "include_stop_str_in_output": bool(more)}
            told = (await it.post(PATH, sent)).json()["choices"][0]
            assert told["text"] == "".join(wanted)
            assert told["token_ids"] == [10, 1, 11, EOS]
            events = await it.events(PATH, sent)
            assert "".join(event["choices"][0]["text"] for event in events) == told["text"]
        told = (await it.post(PATH, {"prompt": "x", "logprobs": 0, "skip_special_tokens": False})).json()["choices"][0]
        assert told["logprobs"]["text_offset"] == [0, 1, 13, 14]


async def test_the_end_of_a_prompt(tiny_llama_dir: Path) -> None:
    async with served(tiny_llama_dir, *workers()) as it:
        ids = it.it.gateway.lifecycle.model.tokenizer.encode("hello")
        for prompt in ("hello", ids, [9] * 5000 + ids[-3:]):
            body = {"prompt": prompt, "truncate_prompt_tokens": 3, "echo": True, "max_tokens": 2}
            told = (await it.post(PATH, body)).json()["choices"][0]
            assert list(it.it.worker("d0").submits[-1].prompt_ids) == ids[-3:]
            assert told["text"] == text_of(it, [*ids[-3:], 10, 11])
        await it.post(PATH, {"prompt": [9] * 5000, "truncate_prompt_tokens": -1, "max_tokens": 1})
        assert len(it.it.worker("p0").submits[-1].prompt_ids) == it.it.gateway.lifecycle.model.max_input
        status, error = await it.refused(PATH, {"prompt": "hello", "truncate_prompt_tokens": 0})
        assert (status, error["param"]) == (400, "truncate_prompt_tokens")


async def test_a_gap(tmp_path: Path) -> None:
    """The marks of the model's own around it."""
    marks = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
    path = make_tiny_llama(tmp_path / "llama", more_tokens=dict.fromkeys(marks, True))
    async with served(path, *workers()) as it:
        answer = await it.sdk.completions.create(model="llama", prompt="def f(", suffix="return 1", max_tokens=2)
        assert answer.choices[0].text == text_of(it, [10, 11])
        decode = it.it.gateway.lifecycle.model.tokenizer.decode
        shown = decode(list(it.it.worker("d0").submits[0].prompt_ids), skip_special=False)
        assert shown == "<|fim_prefix|>def f(<|fim_suffix|>return 1<|fim_middle|>"
        status, error = await it.refused(PATH, {"prompt": [1, 2], "suffix": "x"})
        assert (status, error["param"]) == (400, "suffix")


async def test_logprobs(tiny_llama_dir: Path) -> None:
    async with served(tiny_llama_dir, *workers()) as it:
        answer = await it.sdk.completions.create(model="llama", prompt="hello", max_tokens=2, logprobs=1)
        told = answer.choices[0].logprobs
        assert told is not None
        names = [text_of(it, [token]) for token in (10, 11)]
        assert (told.tokens, told.token_logprobs, told.text_offset) == (names, [-0.5, -0.5], [0, 1])
        assert told.top_logprobs == [{text_of(it, [0]): -1.0, name: -0.5} for name in names]
        body = {"prompt": "x", "max_tokens": 1, "logprobs": 0, "return_tokens_as_token_ids": True}
        told_ids = (await it.post(PATH, body)).json()["choices"][0]["logprobs"]
        assert told_ids == {
            "tokens": ["token_id:10"], "token_logprobs": [-0.5], "top_logprobs": [{"token_id:10": -0.5}],
            "text_offset": [0],
        }  # fmt: skip


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": "x", "top_p": 7}, "top_p"),
        ({"prompt": "x", "stop": ["a"] * 17}, "stop"),
        ({"prompt": "x", "stop": ["a", ""]}, "stop[1]"),
        ({"prompt": "x", "stop_token_ids": [5, 10**6]}, "stop_token_ids[1]"),
        ({"prompt": "x", "logprobs": 21}, "logprobs"),
        ({"prompt": "x", "prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt": "x", "logit_bias": {"5": 1e6}}, "logit_bias[5]"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [1, -1]}, "prompt[1]"),
        ({"prompt": []}, "prompt"),
        ({"prompt": "x", "min_tokens": 17}, "min_tokens"),
        ({"prompt": "x", "seed": 1 << 64}, "seed"),
        ({"prompt": "x", "n": 99}, "n"),
        ({"prompt": "x", "response_format": {"type": "xml"}}, "response_format.type"),
        ({"prompt": "x", "suffix": "y"}, "suffix"),
        ({"prompt": "x", "store": True}, "store"),
        ({"prompt": "x", "metadata": {"a": "b"}}, "metadata"),
    ],
    ids=str,
)
async def test_what_is_wrong_is_named_by_the_api_s_name(tiny_llama_dir: Path, body: Any, param: str) -> None:
    async with served(tiny_llama_dir, *workers()) as it:
        for stream in (False, True):
            status, error = await it.refused(PATH, {**body, "stream": stream})
            assert (status, error["param"]) == (400, param)
            assert error["type"] == "invalid_request_error"
        assert not it.it.worker("d0").submits


async def test_a_prompt_that_is_too_long_has_the_code_that_clients_look_for(tiny_llama_dir: Path) -> None:
    async with served(tiny_llama_dir, *workers()) as it:
        for body in ({"prompt": [1] * 5000}, {"prompt": "x" * 100_000}, {"prompt": [1] * 2000, "max_tokens": 100}):
            status, error = await it.refused(PATH, body)
            assert (status, error["code"]) == (400, "context_length_exceeded")
