"""The Open Inference Protocol's door in front of real workers: what it gives, and that every page comes back."""

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest

from twostroke.oip import grpc_service_pb2_grpc as rpc

from ..services.cluster import refusal
from ..services.oip_client import Stream, collect, infer, read_output, texts
from ..services.oip_fuzz import fuzz
from .harness import Launch, Stack

LONG: dict[str, Any] = {"max_tokens": 1500, "ignore_eos": True}


async def cancelled(stack: Stack, prompts: list[str], responses: int) -> None:
    """Leaves after so many messages of any answer."""
    both = Stream(stack.client.channel)
    asked = [infer(prompt, stream=True, id=str(number), sampling=LONG) for number, prompt in enumerate(prompts)]
    await both.send(*asked)
    reading = asyncio.create_task(both.read())
    async with asyncio.timeout(60):
        while len(both.order) < responses:
            both.changed.clear()
            await both.changed.wait()
    both.call.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    assert await both.call.code() is grpc.StatusCode.CANCELLED
    await stack.whole()


@pytest.mark.slow
async def test_answers_cancels_and_messages_of_any_kind(launch: Launch, tiny_dir: Path) -> None:
    async with launch("--model", str(tiny_dir), "--dtype", "float32", "--kv-memory", "32MiB") as stack:
        door: Any = rpc.GRPCInferenceServiceStub(stack.client.channel)
        greedy: dict[str, Any] = {"sampling": {"temperature": 0, "max_tokens": 40, "n": 2}, "return_logprobs": True}
        whole = await door.ModelInfer(infer("the cat", exclude_input_in_output=True, **greedy))
        answers = read_output(whole, "text_output")
        told = await collect(stack.client.channel, *(infer("the cat", stream=True, id=i, **greedy) for i in "abc"))
        assert [texts(told[name]) for name in "abc"] == [answers] * 3
        await stack.whole()
        for responses in (0, 1, 40):
            await cancelled(stack, ["the cat", "a dog " * 100, "the cat"], responses)
        error = await refusal(door.ModelInfer(infer(sampling=LONG), timeout=0.5))
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        seen = await asyncio.to_thread(fuzz, stack.address, 150)
        assert seen["stream OK"] > 5, seen
        await stack.whole()
        again = await door.ModelInfer(infer("the cat", exclude_input_in_output=True, **greedy))
        assert read_output(again, "text_output") == answers
