"""Workers drain and change their roles under load, and a gateway that starts anew finds them as they are."""

import asyncio
import json
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from .harness import Answer, Launch, Stack, token_request

FLAGS = ("--prefill", "1", "--decode", "2", "--dtype", "float32", "--kv-memory", "16MiB", "--drain-s", "3", "--shm-dir")
LENGTH = 1200


async def workers(stack: Stack, *words: str) -> str:
    """The output of `twostroke workers`, which must succeed."""
    command = [sys.executable, "-m", "twostroke.services.cli", "workers", *words, "--address", stack.address]
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    output, _ = await process.communicate()
    assert process.returncode == 0, output.decode()
    return output.decode()


async def states(stack: Stack) -> dict[str, tuple[str, str]]:
    """(role, state) by name."""
    listed: list[dict[str, Any]] = json.loads(await workers(stack, "list", "--json"))
    return {worker["name"]: (worker["role"], worker["state"]) for worker in listed}


async def started(stack: Stack, count: int) -> list["asyncio.Task[Answer]"]:
    """Long streams, each of which has had some tokens."""
    flowing = [asyncio.Event() for _ in range(count)]

    async def read(i: int) -> Answer:
        answer = Answer()
        async for message in stack.client.call(token_request([i + 3, 9, 17] * 30, max_tokens=LENGTH)):
            answer.take(message)
            if len(answer.token_ids) >= 20:
                flowing[i].set()
        return answer

    tasks = [asyncio.create_task(read(i)) for i in range(count)]
    async with asyncio.timeout(60):
        await asyncio.gather(*(event.wait() for event in flowing))
    return tasks


async def tokens(streams: list["asyncio.Task[Answer]"]) -> list[list[int]]:
    return [answer.token_ids for answer in await asyncio.gather(*streams)]


@pytest.mark.timeout(300)
async def test_workers_drain_and_change_their_roles(launch: Launch, tiny_dir, tmp_path: Path) -> None:
    async with launch("--model", str(tiny_dir), *FLAGS, str(tmp_path)) as stack:
        quiet = await tokens(await started(stack, 6))

        streams = await started(stack, 6)  # what runs at a draining worker goes on elsewhere when its time is over
        await workers(stack, "drain", "decode-1", "--within", "0.2")
        assert await tokens(streams) == quiet
        assert (await states(stack))["decode-1"] == ("decode", "draining")
        answer = await stack.client.tokens([5, 6, 7], max_tokens=5)
        assert answer.finish.decode_worker == "decode-0"

        pid = stack.signal("gateway", signal.SIGKILL)  # the new one learns that the worker drains
        await stack.event("ready", "gateway", after_pid=pid)
        await stack.joined(prefill=1, decode=1)
        assert (await states(stack))["decode-1"] == ("decode", "draining")
        await workers(stack, "undrain", "decode-1")
        await stack.joined(prefill=1, decode=2)

        streams = await started(stack, 6)
        await workers(stack, "role", "decode-1", "prefill")
        assert await tokens(streams) == quiet
        await stack.joined(prefill=2, decode=1)
        assert (await states(stack))["decode-1"] == ("prefill", "ready")
        assert await tokens(await started(stack, 6)) == quiet

        streams = await started(stack, 6)  # the only decode worker of old and the one of now change places
        await workers(stack, "role", "decode-1", "decode")
        await workers(stack, "role", "decode-0", "both")
        assert await tokens(streams) == quiet
        assert (await states(stack))["decode-0"] == ("both", "ready")
        await stack.joined(prefill=2, decode=2)
        await stack.whole()
