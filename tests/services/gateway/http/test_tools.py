"""Tools in chats through a real gateway: what the model is shown, and its calls as the OpenAI SDK takes them."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from twostroke.engine.tokenizer import Tokenizer
from twostroke.v1 import worker_pb2 as wpb

from ....tool_models import TOOL_MODELS, WEATHER, make_tool_model
from ...http_client import USER, Served, served
from ...stand_in_worker import Script, StandIn

PATH = "/v1/chat/completions"
ROME = '{"city": "Rome", "days": 1}'
CALL = '{"name": "get_weather", "arguments": ' + ROME + "}"
TEXTS = {
    "hermes": f"Let me see.\n<tool_call>\n{CALL}\n</tool_call>\n<tool_call>{CALL}</tool_call>",
    "llama": f"<|python_tag|>{CALL.replace('arguments', 'parameters')}; {CALL.replace('arguments', 'parameters')}",
    "mistral": f"[TOOL_CALLS] [{CALL}, {CALL}]",
}
ASK: dict[str, Any] = {"model": "model", "messages": USER, "tools": [WEATHER]}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One of each template."""
    return {form: make_tool_model(tmp_path_factory.mktemp(form) / "model", form) for form in TOOL_MODELS}


@asynccontextmanager
async def saying(path: Path, text: str, **settings: Any) -> AsyncIterator[Served]:
    """A model whose first answer to everything is this text; further ones are other tokens."""
    script = Script(tokens=Tokenizer.from_dir(path).encode_plain(text))
    workers = [StandIn(role, name, script, model="model") for role, name in (("prefill", "p0"), ("decode", "d0"))]
    async with served(path, *workers, **settings) as it:
        yield it


def submits(it: Served) -> list[wpb.Submit]:
    return it.it.worker("d0").submits


def prompt(it: Served) -> str:
    """What the model was shown last."""
    return it.it.gateway.lifecycle.model.tokenizer.decode(list(submits(it)[-1].prompt_ids), skip_special=False)


def shown(calls: Any) -> list[tuple[str, str]]:
    return [(call.function.name, call.function.arguments) for call in calls or []]


@pytest.mark.parametrize("form", TEXTS)
async def test_calls_as_the_sdk_takes_them(models: dict[str, Path], form: str) -> None:
    """Whole and as a stream, put together by its own accumulator."""
    async with saying(models[form], TEXTS[form]) as it:
        whole = (await it.sdk.chat.completions.create(**ASK)).choices[0]
        assert whole.finish_reason == "tool_calls"
        assert whole.message.content == ("Let me see." if form == "hermes" else None)
        assert shown(whole.message.tool_calls) == [("get_weather", ROME)] * 2
        ids = [call.id for call in whole.message.tool_calls or []]
        assert len(set(ids)) == 2
        assert all(len(name) == 9 and name.isalnum() if form == "mistral" else name.startswith("call_") for name in ids)
        async with it.sdk.chat.completions.stream(**ASK) as stream:
            deltas = [
                event.arguments_delta async for event in stream if event.type == "tool_calls.function.arguments.delta"
            ]
            streamed = (await stream.get_final_completion()).choices[0]
        assert shown(streamed.message.tool_calls) == [("get_weather", ROME)] * 2
        assert (streamed.message.content, streamed.finish_reason) == (whole.message.content, "tool_calls")
        assert "".join(deltas) == ROME * 2
        assert '"get_weather"' in prompt(it)


async def test_the_order_of_deltas(models: dict[str, Path]) -> None:
    async with saying(models["hermes"], TEXTS["hermes"]) as it:
        events = await it.events(PATH, {**ASK, "logprobs": True, "return_token_ids": True})
        choices = [event["choices"][0] for event in events]
        first, *middle, end = [choice["delta"] for choice in choices]
        assert first == {"role": "assistant", "content": None}
        assert end == {}
        assert choices[-1]["finish_reason"] == "tool_calls"
        calls = [delta["tool_calls"][0] for delta in middle if "tool_calls" in delta]
        begun = [call for call in calls if "id" in call]
        assert [call["index"] for call in begun] == [0, 1]
        assert all(call["type"] == "function" for call in begun)
        assert all(call["function"] == {"name": "get_weather", "arguments": ""} for call in begun)
        rest = [call for call in calls if "id" not in call]
        assert all(set(call) == {"index", "function"} and set(call["function"]) == {"arguments"} for call in rest)
        assert all(call["function"]["arguments"] for call in rest)
        (submit,) = submits(it)
        tokens = [token for choice in choices for token in choice.get("token_ids", [])]
        assert tokens[:-1] == it.it.worker("d0").script.tokens
        entries = [entry for choice in choices for entry in (choice["logprobs"] or {"content": []})["content"]]
        assert len(entries) == len(tokens)
        assert not submit.params.HasField("constraint")


async def test_each_answer_calls_for_itself(models: dict[str, Path]) -> None:
    async with saying(models["llama"], TEXTS["llama"]) as it:
        answer = await it.sdk.chat.completions.create(**ASK, n=2)
        async with it.sdk.chat.completions.stream(**ASK, n=2) as stream:
            async for _ in stream:
                pass
            streamed = await stream.get_final_completion()
        for told in (answer, streamed):
            calls, text = told.choices
            assert (calls.finish_reason, len(calls.message.tool_calls or [])) == ("tool_calls", 2)
            assert (text.finish_reason, text.message.tool_calls) == ("stop", None)
            assert text.message.content


async def test_a_call_that_breaks_off(models: dict[str, Path]) -> None:
    """Whole, it is text. In a stream its arguments stay as they are, the rest is text, and nothing was called."""
    text = '<tool_call>{"name": "get_weather", "arguments": {"city": Rome}}</tool_call>'
    async with saying(models["hermes"], text) as it:
        whole = (await it.sdk.chat.completions.create(**ASK)).choices[0]
        assert (whole.message.content, whole.message.tool_calls, whole.finish_reason) == (text, None, "stop")
        events = await it.events(PATH, ASK)
        deltas = [event["choices"][0]["delta"] for event in events]
        arguments = "".join(d["tool_calls"][0]["function"]["arguments"] for d in deltas if "tool_calls" in d)
        assert arguments == '{"city": '
        assert "".join(delta.get("content") or "" for delta in deltas) == "Rome}}</tool_call>"
        assert events[-1]["choices"][0]["finish_reason"] == "stop"
        cut = (await it.sdk.chat.completions.create(**ASK, max_tokens=12)).choices[0]
        assert (cut.finish_reason, cut.message.tool_calls) == ("length", None)
        assert text.startswith(cut.message.content or "?")


async def test_no_tools_no_calls(models: dict[str, Path]) -> None:
    """Marks are special tokens, so they are no text unless asked for; without tools nobody looks for them."""
    async with saying(models["mistral"], TEXTS["mistral"]) as it:
        asked: dict[str, Any] = {"model": "model", "messages": USER}
        plain = (await it.sdk.chat.completions.create(**asked)).choices[0]
        assert (plain.message.content, plain.finish_reason) == (f" [{CALL}, {CALL}]", "stop")
        none = (await it.sdk.chat.completions.create(**ASK, tool_choice="none")).choices[0]
        assert none.message == plain.message
        assert "AVAILABLE_TOOLS" not in prompt(it)
        special: dict[str, Any] = {"extra_body": {"skip_special_tokens": False}}
        text = (await it.sdk.chat.completions.create(**asked, **special)).choices[0].message.content
        assert text == TEXTS["mistral"]
        called = (await it.sdk.chat.completions.create(**ASK, **special)).choices[0]
        assert len(called.message.tool_calls or []) == 2


async def test_what_a_model_is_held_to(models: dict[str, Path]) -> None:
    """The grammar goes to the workers; with parallel_tool_calls false there is one call, whatever comes."""
    async with saying(models["hermes"], TEXTS["hermes"]) as it:
        named = {"type": "function", "function": {"name": "get_weather"}}
        for choice in ("required", named):
            await it.sdk.chat.completions.create(**ASK, tool_choice=choice)  # type: ignore[arg-type]
            constraint = submits(it)[-1].params.constraint
            assert constraint.kind == wpb.CONSTRAINT_KIND_GRAMMAR
            assert '"enum": ["Rome", "Oslo"]' in constraint.text
        one = (await it.sdk.chat.completions.create(**ASK, parallel_tool_calls=False)).choices[0].message
        assert shown(one.tool_calls) == [("get_weather", ROME)]
        assert submits(it)[-1].params.HasField("constraint")
        schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"title": "Answer"}}}
        await it.post(PATH, {**ASK, "response_format": schema})
        assert "Answer" in submits(it)[-1].params.constraint.text


async def test_a_conversation_with_calls(models: dict[str, Path]) -> None:
    """What came goes back, and reaches the model as its template writes it."""
    async with saying(models["hermes"], TEXTS["hermes"]) as it:
        message = (await it.sdk.chat.completions.create(**ASK)).choices[0].message
        answers = [
            {"role": "tool", "tool_call_id": call.id, "content": f"sun {index}"}
            for index, call in enumerate(message.tool_calls or [])
        ]
        turns: list[Any] = [*USER, message, *answers]
        await it.sdk.chat.completions.create(model="model", messages=turns, tools=[WEATHER])  # type: ignore[list-item]
        assert prompt(it).endswith(
            f"<|im_start|>assistant\nLet me see.<tool_call>{CALL}</tool_call><tool_call>{CALL}</tool_call><|im_end|>\n"
            "<|im_start|>tool\nsun 0<|im_end|>\n<|im_start|>tool\nsun 1<|im_end|>\n<|im_start|>assistant\n"
        )
        told = (await it.post("/tokenize", {"messages": USER, "tools": [WEATHER]})).json()
        await it.sdk.chat.completions.create(**ASK)
        assert told["tokens"] == list(submits(it)[-1].prompt_ids)


async def test_templates_and_parsers_that_do_not_fit(models: dict[str, Path], tiny_llama_dir: Path) -> None:
    calls = [{"id": "c", "function": {"name": "f", "arguments": "{}"}}]
    async with served(tiny_llama_dir) as it:
        for body, param in (
            ({"tools": [WEATHER]}, "tools"),
            ({"messages": [{"role": "assistant", "content": "", "tool_calls": calls}]}, "messages[0].tool_calls"),
        ):
            status, error = await it.refused(PATH, {"messages": USER, **body})
            assert (status, error["param"], error["code"]) == (400, param, "unsupported_parameter")
            assert "template" in error["message"]
    async with served(models["hermes"], tool_parser="none") as it:
        status, error = await it.refused(PATH, {"messages": USER, "tools": [WEATHER]})
        assert (status, error["param"]) == (400, "tools")
        assert "--tool-parser" in error["message"]
    async with saying(models["hermes"], "[get_weather(city='Rome', days=1)]", tool_parser="pythonic") as it:
        told = (await it.sdk.chat.completions.create(**ASK)).choices[0]
        assert shown(told.message.tool_calls) == [("get_weather", ROME)]
        await it.sdk.chat.completions.create(**ASK, tool_choice="required")
        assert 'start: "[" call' in submits(it)[-1].params.constraint.text
        odd = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a=b": {}}}}}
        status, error = await it.refused(PATH, {"messages": USER, "tools": [odd], "tool_choice": "required"})
        assert (status, error["param"]) == (400, "tools")
        assert "'a=b' cannot be an argument's name" in error["message"]
    async with served(models["mistral"]) as it:
        status, error = await it.refused(PATH, {"messages": [{"role": "assistant", "tool_calls": calls}]})
        assert (status, error["param"]) == (400, "messages")
        assert "length 9" in error["message"]


async def test_what_a_template_does_not_know_is_refused(models: dict[str, Path], tiny_llama_dir: Path) -> None:
    async with saying(models["hermes"], "x") as it:
        for more, end in (
            ({}, "assistant\n"),
            ({"chat_template_kwargs": {"enable_thinking": False}}, "assistant\n<think></think>"),
            ({"reasoning_effort": "none"}, "assistant\n<think></think>"),
            ({"reasoning_effort": "high"}, "assistant\n"),
            ({"verbosity": "medium"}, "assistant\n"),
            ({"add_generation_prompt": False}, "hello<|im_end|>\n"),
            ({"continue_final_message": True}, "hello"),
        ):
            await it.post(PATH, {"messages": USER, **more})
            assert prompt(it).endswith(end)
        whole = list(submits(it)[0].prompt_ids)
        await it.post(PATH, {"messages": USER, "truncate_prompt_tokens": 3})
        assert list(submits(it)[-1].prompt_ids) == whole[-3:]
        await it.post(PATH, {"messages": [{"role": "user", "name": "Bob", "content": "hi"}]})
        assert "user\nBob: hi" in prompt(it)
    named = {"messages": [{"role": "user", "name": "Bob", "content": "hi"}]}
    async with served(tiny_llama_dir) as it:
        for body, param in (
            (named, "messages[0].name"),
            ({"messages": [{"role": "user", "name": "Bob", "content": "x" * 1500}]}, "messages[0].name"),
            (
                {"messages": [{"role": "assistant", "content": "", "reasoning_content": "h"}]},
                "messages[0].reasoning_content",
            ),
            ({"chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs.enable_thinking"),
            ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
            ({"documents": [{"text": "x"}]}, "documents"),
            ({"reasoning_effort": "high"}, "reasoning_effort"),
            ({"reasoning_effort": "huge"}, "reasoning_effort"),
            ({"verbosity": "low"}, "verbosity"),
            ({"verbosity": "x"}, "verbosity"),
            ({"continue_final_message": True, "add_generation_prompt": True}, "add_generation_prompt"),
            ({"functions": [{"name": "f"}]}, "functions"),
            ({"function_call": "auto"}, "function_call"),
            ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ):
            status, error = await it.refused(PATH, {"messages": USER, **body})
            assert (status, error["param"]) == (400, param), body
        assert "send tools" in (await it.refused(PATH, {"messages": USER, "functions": [{}]}))[1]["message"]
