"""Calls of tools by a real stack whose model has a template for them, through the unmodified OpenAI SDK."""

import asyncio
import json
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

from ..tool_models import TOOL_MODELS, WEATHER, make_tool_model
from .harness import Launch, Stack
from .test_openai import FLAGS, client

ASK: dict[str, Any] = {
    "model": "model",
    "messages": [{"role": "user", "content": "What is the weather in Rome?"}],
    "tools": [WEATHER, {"type": "function", "function": {"name": "now"}}],
}
BOTH = ("--prefill", "0", "--decode", "0", "--both", "1")
NAMED = {"type": "function", "function": {"name": "get_weather"}}


def check(message: Any) -> None:
    """One whole call whose arguments keep to the schema."""
    (call,) = message.tool_calls
    assert (call.function.name, message.content) == ("get_weather", None)
    arguments = json.loads(call.function.arguments)
    assert set(arguments) == {"city", "days"}
    assert arguments["city"] in ("Rome", "Oslo")
    assert arguments["days"] in (1, 2)


async def forced(sdk: AsyncOpenAI) -> None:
    """A random model calls what it must, whole and streamed, in each of several answers; greedy ones are the same."""
    whole = await sdk.chat.completions.create(**ASK, tool_choice=NAMED, n=3)
    for choice in whole.choices:
        assert choice.finish_reason == "tool_calls"
        check(choice.message)
    greedy = [await sdk.chat.completions.create(**ASK, tool_choice=NAMED, temperature=0) for _ in range(2)]
    async with sdk.chat.completions.stream(**ASK, tool_choice=NAMED, temperature=0) as stream:
        async for _ in stream:
            pass
        streamed = (await stream.get_final_completion()).choices[0]
    check(streamed.message)
    assert streamed.finish_reason == "tool_calls"
    calls = [answer.choices[0].message.tool_calls for answer in greedy] + [streamed.message.tool_calls]
    assert len({call[0].function.arguments for call in calls if call is not None}) == 1  # type: ignore[union-attr]
    any_tool = await sdk.chat.completions.create(**ASK, tool_choice="required", parallel_tool_calls=False)
    (call,) = any_tool.choices[0].message.tool_calls or []
    assert call.type == "function"
    assert call.function.name in ("get_weather", "now")


async def asked(sdk: AsyncOpenAI) -> None:
    """Where it may choose, a random model writes text; its answer is taken as it is, and a call of it goes back."""
    answer = await sdk.chat.completions.create(**ASK, max_tokens=24)
    assert answer.choices[0].message.content or answer.choices[0].message.tool_calls
    call = (await sdk.chat.completions.create(**ASK, tool_choice=NAMED)).choices[0].message
    result = {"role": "tool", "tool_call_id": call.tool_calls[0].id, "content": "sunny"}  # type: ignore[index]
    turns = [*ASK["messages"], call, result]
    again = await sdk.chat.completions.create(**{**ASK, "messages": turns}, max_tokens=8)
    assert again.usage is not None
    assert again.usage.prompt_tokens > answer.usage.prompt_tokens  # type: ignore[union-attr]


async def left(stack: Stack, sdk: AsyncOpenAI) -> None:
    """A client that leaves in the middle of a call costs no page."""
    stream = await sdk.chat.completions.create(**ASK, tool_choice=NAMED, stream=True)
    async for chunk in stream:
        if chunk.choices[0].delta.tool_calls:
            break
    await stream.close()
    call = asyncio.create_task(sdk.chat.completions.create(**ASK, tool_choice="required"))
    await asyncio.wait([call], timeout=0.2)
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    await stack.whole()


async def refused(sdk: AsyncOpenAI) -> None:
    """A schema that cannot be kept, where it is to be."""
    function = {"name": "f", "strict": True, "parameters": {"type": "object", "unevaluatedProperties": {"not": {}}}}
    with pytest.raises(openai.BadRequestError) as caught:
        await sdk.chat.completions.create(**{**ASK, "tools": [{"type": "function", "function": function}]})
    assert caught.value.param == "tools"


async def test_a_model_that_must_call_a_tool(launch: Launch, tmp_path: Path) -> None:
    model = make_tool_model(tmp_path / "model", "hermes")
    async with launch("--model", str(model), *FLAGS, *BOTH) as stack, client(stack) as sdk:
        await forced(sdk)
        await asked(sdk)
        await refused(sdk)
        await left(stack, sdk)


@pytest.mark.slow
@pytest.mark.parametrize("form", TOOL_MODELS)
async def test_every_form_on_two_workers(launch: Launch, tmp_path: Path, form: str) -> None:
    model = make_tool_model(tmp_path / "model", form)
    async with launch("--model", str(model), *FLAGS) as stack, client(stack) as sdk:
        await forced(sdk)
        await left(stack, sdk)
