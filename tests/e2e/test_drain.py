"""SIGTERM at a gateway, a prefill and a decode worker under load: nothing new is taken, and what runs is not lost."""

import asyncio
import signal
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import httpx2
import pytest
from google.rpc import error_details_pb2

from twostroke.v1 import inference_pb2 as pb

from ..services.cluster import detail, retry_s
from .harness import Answer, Launch, Stack, token_request

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
FLAGS = ("--dtype", "float32", "--kv-memory", "32MiB", "--shm-dir")


async def streams(stack: Stack, count: int, *, prompt: int, tokens: int, begun: int) -> list["asyncio.Task[Answer]"]:
    """Streams on their way, so many of which have had a token."""
    flowing = asyncio.Semaphore(0)

    async def read(i: int) -> Answer:
        answer = Answer()
        request = token_request([3 + (i * 31 + at * 7) % 240 for at in range(prompt)], max_tokens=tokens)
        async for message in stack.client.call(request):
            if not answer.messages:
                flowing.release()
            answer.take(message)
        return answer

    tasks = [asyncio.create_task(read(i)) for i in range(count)]
    async with asyncio.timeout(60):
        for _ in range(begun):
            await flowing.acquire()
    return tasks


async def tokens_of(tasks: list["asyncio.Task[Answer]"]) -> list[list[int]]:
    return [answer.token_ids for answer in await asyncio.gather(*tasks)]


async def exit_code(stack: Stack, pid: int) -> Any:
    """Of a process that ended."""
    async with asyncio.timeout(60), stack.changed:
        await stack.changed.wait_for(lambda: any(e["event"] == "exited" and e["pid"] == pid for e in stack.events))
    return next(e for e in stack.events if e["event"] == "exited" and e["pid"] == pid)["code"]


async def refused(stack: Stack) -> grpc.aio.AioRpcError:
    """What a new request is told."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stack.client.tokens([5, 6, 7], max_tokens=2)
    return caught.value


async def test_a_gateway_lets_streams_end_and_takes_nothing_new(launch: Launch, tiny_dir: Path, tmp_path: Path) -> None:
    async with launch("--model", str(tiny_dir), *FLAGS, str(tmp_path)) as stack:
        quiet = await tokens_of(await streams(stack, 6, prompt=90, tokens=1500, begun=6))
        running = await streams(stack, 6, prompt=90, tokens=1500, begun=6)
        async with httpx2.AsyncClient(base_url=stack.http.removesuffix("/v1")) as http:
            assert (await http.get("/health")).status_code == 200  # a connection that is there
            pid = stack.signal("gateway", signal.SIGTERM)
            while (await http.get("/health")).status_code == 200:
                await asyncio.sleep(0.02)
        error = await refused(stack)
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert detail(error, error_details_pb2.ErrorInfo).reason == "UNAVAILABLE"
        assert retry_s(error) > 0
        assert not any(task.done() for task in running), "make the streams longer"
        assert await tokens_of(running) == quiet
        assert await exit_code(stack, pid) == 0
        await stack.event("ready", "gateway", after_pid=pid)
        await stack.joined(prefill=1, decode=1)
        await stack.whole()


async def test_a_gateway_cuts_what_takes_longer(launch: Launch, tiny_dir: Path, tmp_path: Path) -> None:
    flags = ("--drain-s", "0.5", "--max-batch", "4")
    async with launch("--model", str(tiny_dir), *FLAGS, str(tmp_path), *flags) as stack:
        running = await streams(stack, 12, prompt=90, tokens=1900, begun=4)
        pid = stack.signal("gateway", signal.SIGTERM)
        results = await asyncio.gather(*running, return_exceptions=True)
        cut = [result for result in results if isinstance(result, grpc.aio.AioRpcError)]
        assert cut, "make the streams longer"
        for error in cut:
            assert error.code() is grpc.StatusCode.UNAVAILABLE, error
            assert "shutting down" in (error.details() or "")
            assert retry_s(error) > 0
        assert all(isinstance(result, grpc.aio.AioRpcError | Answer) for result in results)
        assert await exit_code(stack, pid) == 0
        await stack.event("ready", "gateway", after_pid=pid)
        await stack.joined(prefill=1, decode=1)
        await stack.whole()


async def test_a_prefill_worker_pushes_what_it_owes(launch: Launch, tiny_dir: Path, tmp_path: Path) -> None:
    """Prompts that it was sent are computed and handed over before it exits: none of them is begun anew elsewhere."""
    flags = ("--token-budget", "64", "--decode-prefill-budget", "16")
    async with launch("--model", str(tiny_dir), *FLAGS, str(tmp_path), *flags) as stack:
        running = await streams(stack, 12, prompt=1500, tokens=60, begun=1)
        pid = stack.signal("prefill-0", signal.SIGTERM)
        async with asyncio.timeout(10):
            while True:
                later = await stack.client.tokens([9, 8, 7], max_tokens=2)
                if later.finish.prefill_worker == "decode-0":
                    break  # until its word has come, the gateway may send it more
        answers = await asyncio.gather(*running)
        assert {answer.finish.prefill_worker for answer in answers} == {"prefill-0"}
        assert [answer.finish.replays for answer in answers] == [0] * 12
        assert await exit_code(stack, pid) == 0
        await stack.event("ready", "prefill-0", after_pid=pid)
        await stack.joined(prefill=1, decode=1)
        again = await tokens_of(await streams(stack, 12, prompt=1500, tokens=60, begun=1))
        assert again == [answer.token_ids for answer in answers]
        await stack.whole()


async def test_a_decode_worker_finishes_or_hands_over(launch: Launch, tiny_dir: Path, tmp_path: Path) -> None:
    """Short answers are ended by the worker itself, long ones go on at another one; either way nobody notices."""
    flags = ("--decode", "2", "--drain-s", "2", "--max-batch", "8")
    async with launch("--model", str(tiny_dir), *FLAGS, str(tmp_path), *flags) as stack:
        short_quiet = await tokens_of(await streams(stack, 4, prompt=60, tokens=40, begun=4))
        long_quiet = await tokens_of(await streams(stack, 8, prompt=90, tokens=1900, begun=8))
        long = await streams(stack, 8, prompt=90, tokens=1900, begun=8)
        short = await streams(stack, 4, prompt=60, tokens=40, begun=4)
        pid = stack.signal("decode-1", signal.SIGTERM)
        later = await stack.client.tokens([5, 6, 7] * 9, max_tokens=4)
        assert later.finish.decode_worker == "decode-0"
        ended = await asyncio.gather(*short)
        assert [answer.token_ids for answer in ended] == short_quiet
        assert not any(answer.finish.replays for answer in ended)
        moved = await asyncio.gather(*long)
        assert [answer.token_ids for answer in moved] == long_quiet
        assert all(answer.finish.reason == pb.FINISH_REASON_LENGTH for answer in moved)
        assert any(answer.finish.replays for answer in moved), "make the streams longer"
        assert await exit_code(stack, pid) == 0
        await stack.event("ready", "decode-1", after_pid=pid)
        await stack.joined(prefill=1, decode=2)
        await stack.whole()
