"""Choosing workers by what they have cached: a chat hits more often than where they are chosen at random."""

import asyncio
import json
import random
import signal
import sys
from pathlib import Path

import pytest

from .harness import Launch, Stack

FLAGS = ("--prefill", "2", "--decode", "2", "--dtype", "float32", "--kv-memory", "32MiB")


async def chat(stack: Stack, conversations: int = 8, turns: int = 5) -> tuple[float, list[list[int]]]:
    """(share of cached prompt tokens, all answers) of conversations with a common beginning, their turns mixed."""
    chance = random.Random(5)
    system = [chance.randrange(3, 250) for _ in range(64)]
    said = [[*system, *(chance.randrange(3, 250) for _ in range(200))] for _ in range(conversations)]
    order = [i for i in range(conversations) for _ in range(turns)]
    chance.shuffle(order)
    cached = prompt = 0
    answers = []
    for speaker in order:
        said[speaker] += [chance.randrange(3, 250) for _ in range(40)]
        answer = await stack.client.tokens(said[speaker], max_tokens=16)
        cached += answer.finish.usage.cached_tokens
        prompt += answer.finish.usage.prompt_tokens
        said[speaker] += answer.token_ids
        answers.append(answer.token_ids)
        assert "tokens cached" in answer.finish.route
    return cached / prompt, answers


async def cached_pages(stack: Stack) -> dict[str, int]:
    """What the gateway knows of each worker's prefix cache."""
    words = ("workers", "list", "--json", "--address", stack.address)
    command = (sys.executable, "-m", "twostroke.services.cli", *words)
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    output, _ = await process.communicate()
    return {worker["name"]: worker["cached_pages"] for worker in json.loads(output)}


@pytest.mark.slow
async def test_a_chat_hits_more_often_than_at_random(launch: Launch, tiny_dir: Path) -> None:
    shares, answers = {}, {}
    for routing in ("prefix", "random"):
        async with launch("--model", str(tiny_dir), *FLAGS, "--routing", routing) as stack:
            await stack.joined(prefill=2, decode=2)
            shares[routing], answers[routing] = await chat(stack)
            if routing == "prefix":
                async with asyncio.timeout(20):
                    while sum((await cached_pages(stack)).values()) < 2 * 60:
                        await asyncio.sleep(0.3)
            await stack.whole()
    print(f"cached share of prompt tokens: {shares}")
    assert answers["prefix"] == answers["random"]
    assert shares["prefix"] > 0.7
    assert shares["prefix"] > shares["random"] + 0.1


async def test_a_restarted_gateway_learns_what_workers_have(launch: Launch, tiny_dir: Path) -> None:
    """It knows nothing of who was sent what; it is told by the workers. A chat then hits what they have."""
    chance = random.Random(9)
    prompts = [[chance.randrange(3, 250) for _ in range(330)] for _ in range(6)]
    async with launch("--model", str(tiny_dir), *FLAGS) as stack:
        await stack.joined(prefill=2, decode=2)
        before = [(await stack.client.tokens(prompt, max_tokens=4)).finish.prefill_worker for prompt in prompts]
        assert len(set(before)) == 2
        pid = stack.signal("gateway", signal.SIGKILL)
        await stack.event("ready", "gateway", after_pid=pid)
        await stack.joined(prefill=2, decode=2)
        async with asyncio.timeout(20):
            while sum((await cached_pages(stack)).values()) < 2 * 6 * 20:
                await asyncio.sleep(0.3)
        again = [(await stack.client.tokens(prompt, max_tokens=4)).finish for prompt in prompts]
        assert [finish.prefill_worker for finish in again] == before
        assert all(finish.usage.cached_tokens >= 320 for finish in again)
        share, _ = await chat(stack)
        assert share > 0.7
        await stack.whole()
