"""Constrained outputs in a real stack: replays after a kill, cancels in every phase, hostile grammars beside others."""

import asyncio
import contextlib
import json
import random
import re
import signal
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from twostroke.v1 import inference_pb2 as pb

from .harness import Answer, Launch, Stack, token_request

FLAGS = ("--dtype", "float32", "--kv-memory", "32MiB", "--shm-dir")
WORDS = "([a-f]{3},){300}[a-f]"  # about 900 tokens of the tiny vocabulary
SCHEMA = {"type": "array", "items": {"enum": [1, 22, 333]}, "minItems": 8, "maxItems": 10}
HOSTILE = [
    pb.Constraint(grammar="start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(12000)) + '\nr12000: "a"'),
    pb.Constraint(json_schema=json.dumps({"type": "integer", "multipleOf": 999983})),
    pb.Constraint(regex="((a{1,1000}){1,1000}){1,1000}b" * 40),
    pb.Constraint(grammar='start: s\ns: "" | s s | "a" s | s "b" | s s s'),
    pb.Constraint(json_schema=json.dumps({"properties": {f"p{i}": {"type": "string"} for i in range(4000)}})),
    pb.Constraint(regex="(" * 200_000),
    pb.Constraint(choice=pb.Choice(texts=["a" * 1000] * 200)),
    pb.Constraint(json_schema='{"items":' * 20_000),
]


def request(constraint: pb.Constraint, seed: int, **stopping: Any) -> pb.GenerateRequest:
    """Free draws under a constraint; the model of these tests knows nothing."""
    asked = token_request([5, 6, 7] * 20, max_tokens=1900, ignore_eos=False, temperature=1.5, seed=seed)
    asked.sampling.constraint.CopyFrom(constraint)
    asked.stopping.MergeFrom(pb.Stopping(**stopping))
    return asked


async def started(stack: Stack, asked: list[pb.GenerateRequest], tokens: int) -> list["asyncio.Task[Answer]"]:
    """Streams, each of which has had so many tokens."""
    flowing = [asyncio.Event() for _ in asked]

    async def read(i: int) -> Answer:
        answer = Answer()
        async for message in stack.client.call(asked[i]):
            answer.take(message)
            if len(answer.token_ids) >= tokens:
                flowing[i].set()
        return answer

    tasks = [asyncio.create_task(read(i)) for i in range(len(asked))]
    async with asyncio.timeout(60):
        await asyncio.gather(*(event.wait() for event in flowing))
    return tasks


@pytest.mark.slow
async def test_a_killed_decode_worker_s_outputs_go_on_under_their_constraints(
    launch: Launch, tiny_dir: Path, tmp_path: Path
) -> None:
    """The state of each is made anew from the tokens that the client has; in fp32 the same tokens come."""
    asked = [request(pb.Constraint(regex=WORDS), seed) for seed in range(3)]
    asked += [request(pb.Constraint(json_schema=json.dumps(SCHEMA)), seed) for seed in range(3)]
    async with launch("--model", str(tiny_dir), *FLAGS, str(tmp_path)) as stack:
        quiet = await asyncio.gather(*await started(stack, asked, 1))
        for victim in ("decode-0", "prefill-0"):
            streams = await started(stack, asked, 40)
            pid = stack.signal(victim, signal.SIGKILL)
            for answer, before in zip(await asyncio.gather(*streams), quiet, strict=True):
                assert answer.token_ids == before.token_ids
                assert answer.finish.reason == pb.FINISH_REASON_STOP
                assert answer.finish.replays == (victim == "decode-0")
            await stack.event("ready", victim, after_pid=pid)
            await stack.joined(prefill=1, decode=1)
        for answer in quiet[:3]:
            assert re.fullmatch(WORDS, answer.text)
        for answer in quiet[3:]:
            assert 8 <= len(json.loads(answer.text)) <= 10
        await stack.whole()


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_hostile_constraints_and_cancels_cost_others_nothing(
    launch: Launch, tiny_dir: Path, tmp_path: Path
) -> None:
    """Refused by their field, within a bounded time; or they end by themselves. A neighbour gets its tokens."""
    chance = random.Random(3)
    async with launch("--model", str(tiny_dir), *FLAGS, str(tmp_path)) as stack:
        neighbour = await stack.client.tokens([5, 6, 7] * 20, max_tokens=1000)
        good = [(pb.Constraint(regex=WORDS), 0), (pb.Constraint(json_schema=json.dumps(SCHEMA)), 1)]
        expected = [(await stack.client.generate(request(*each))).token_ids for each in good]

        async def hostile(number: int) -> None:
            asked = request(HOSTILE[number % len(HOSTILE)], number, max_tokens=200)
            try:
                await stack.client.generate(asked)
            except grpc.aio.AioRpcError as error:
                allowed = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED)
                assert error.code() in allowed, error
                assert "constraint" in (error.details() or "")

        async def leaving(number: int) -> None:
            call = stack.client.call(request(pb.Constraint(regex=f"x{number}[a-f,]*"), number))
            await asyncio.sleep(chance.random() / 2)
            call.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await call.code()

        attacks = [asyncio.create_task(hostile(number)) for number in range(24)]
        attacks += [asyncio.create_task(leaving(number)) for number in range(60)]
        streams = [asyncio.create_task(stack.client.generate(request(*each))) for each in good]
        assert (await stack.client.tokens([5, 6, 7] * 20, max_tokens=1000)).token_ids == neighbour.token_ids
        assert [answer.token_ids for answer in await asyncio.gather(*streams)] == expected
        async with asyncio.timeout(120):
            await asyncio.gather(*attacks)
        assert not [e for e in stack.events if e["event"] == "exited"], "a process died"
        await stack.whole()
