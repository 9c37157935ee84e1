"""Nothing is lost when clients leave and processes die: pages come back, the others go on, the dead start again."""

import asyncio
import random
import signal
from pathlib import Path

import grpc
import grpc.aio
import pytest

from .harness import Answer, Client, Launch, Stack, token_request

FLAGS = ("--dtype", "float32", "--kv-memory", "32MiB", "--shm-dir")


def _mapped_pools(pid: int, folder: Path) -> set[str]:
    """Pool files in `folder` that a process has mapped; a deleted one is marked by the kernel."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {line.split(maxsplit=5)[5] for line in lines if str(folder) in line}


async def _started(client: Client, count: int) -> list["asyncio.Task[Answer]"]:
    """`count` long streams, each of which has had a token."""
    flowing = [asyncio.Event() for _ in range(count)]

    async def read(i: int) -> Answer:
        answer = Answer()
        async for message in client.call(token_request([i + 3, 9, 17] * 30, max_tokens=1900)):
            answer.take(message)
            flowing[i].set()
        return answer

    tasks = [asyncio.create_task(read(i)) for i in range(count)]
    async with asyncio.timeout(60):
        await asyncio.gather(*(event.wait() for event in flowing))
    return tasks


async def _restarted(stack: Stack, victim: str, expected: list[list[int]]) -> int:
    """Kills `victim` under load; returns its old pid once it serves again and requests work.

    A dead worker costs no stream anything; a dead gateway's clients learn that it is gone.
    """
    others = {name: stack.current(name)["pid"] for name in [*stack.workers(), "gateway"] if name != victim}
    streams = await _started(stack.client, 8)
    pid = stack.signal(victim, signal.SIGKILL)
    results = await asyncio.gather(*streams, return_exceptions=True)
    for result, tokens in zip(results, expected, strict=True):
        if isinstance(result, Answer):
            assert result.token_ids == tokens
        else:
            assert victim == "gateway", result
            assert isinstance(result, grpc.aio.AioRpcError), result
            assert result.code() is grpc.StatusCode.UNAVAILABLE, result
    if victim == "decode-0":
        assert all(isinstance(result, Answer) and result.finish.replays == 1 for result in results)
    await stack.event("ready", victim, after_pid=pid)
    await stack.joined(prefill=1, decode=1)
    answer = await stack.client.tokens([5, 6, 7] * 20, max_tokens=20)
    assert answer.finish.prefill_worker == "prefill-0"
    assert answer.finish.decode_worker == "decode-0"
    assert {name: stack.current(name)["pid"] for name in others} == others, "another process was restarted too"
    await stack.whole()
    return pid


@pytest.mark.timeout(300)
async def test_a_killed_process_leaves_the_others_whole(launch: Launch, tiny_dir, tmp_path: Path) -> None:
    """P, D and the gateway, each killed under load, twice for D."""
    async with launch("--model", str(tiny_dir), *FLAGS, str(tmp_path)) as stack:
        before = await stack.client.tokens([5, 6, 7] * 20, max_tokens=20)
        quiet = [answer.token_ids for answer in await asyncio.gather(*await _started(stack.client, 8))]
        for victim in ("prefill-0", "decode-0", "gateway", "decode-0"):
            await _restarted(stack, victim, quiet)
            assert (await stack.client.tokens([5, 6, 7] * 20, max_tokens=20)).token_ids == before.token_ids
            pools = _mapped_pools(stack.current("prefill-0")["pid"], tmp_path)
            assert len(pools) == 1, "the prefill worker maps the pool of a dead decode worker"
            assert not any("deleted" in pool for pool in pools)
            assert len(list(tmp_path.glob("twostroke*"))) == 1, "a dead worker's pool file was left behind"


async def test_a_short_freeze_loses_nothing(launch: Launch, tiny_dir, tmp_path: Path) -> None:
    """A process stopped for less than the silence goes on where it was."""
    async with launch("--model", str(tiny_dir), *FLAGS, str(tmp_path)) as stack:
        for victim in ("prefill-0", "decode-0", "gateway"):
            streams = await _started(stack.client, 4)
            stack.signal(victim, signal.SIGSTOP)
            await asyncio.sleep(1.5)
            stack.signal(victim, signal.SIGCONT)
            for answer in await asyncio.gather(*streams):
                assert len(answer.token_ids) == 1900
        await stack.whole()


@pytest.mark.parametrize("victim", ["prefill-0", "decode-0"])
async def test_a_frozen_process_is_fenced(launch: Launch, tiny_dir, tmp_path: Path, victim: str) -> None:
    """One that stays silent is killed and started again; streams go on, and nothing of it is left in the others."""
    flags = ("--silence-s", "2")
    async with launch("--model", str(tiny_dir), *FLAGS, str(tmp_path), *flags) as stack:
        quiet = [answer.token_ids for answer in await asyncio.gather(*await _started(stack.client, 4))]
        streams = await _started(stack.client, 4)
        pid = stack.signal(victim, signal.SIGSTOP)
        assert [answer.token_ids for answer in await asyncio.gather(*streams)] == quiet
        await stack.event("ready", victim, after_pid=pid)
        await stack.joined(prefill=1, decode=1)
        await stack.client.tokens([5, 6, 7] * 20, max_tokens=20)
        await stack.whole()


async def test_a_thousand_cancels(launch: Launch, tiny_dir, tmp_path: Path) -> None:
    """Requests cancelled at random moments, some by time, some by token, some by their deadline."""
    chance = random.Random(20)
    async with launch("--model", str(tiny_dir), *FLAGS, str(tmp_path), "--token-budget", "64") as stack:
        quiet = await stack.client.tokens(range(3, 60), max_tokens=40)

        async def one(number: int) -> None:
            prompt = [chance.randrange(3, 250) for _ in range(chance.choice((1, 15, 16, 17, 200, 900)))]
            if chance.random() < 0.5:
                prompt[:100] = range(3, 103)
            request = token_request(prompt, max_tokens=chance.choice((1, 2, 50, 500)), temperature=1.0, seed=number)
            kind, moment = chance.randrange(3), chance.random() ** 2
            call = stack.client.call(request, timeout=moment + 0.001 if kind == 0 else 60)
            left = int(moment * 60) if kind == 1 else 10**6
            try:
                async with asyncio.timeout(moment if kind == 2 else None):
                    async for _ in call:
                        left -= 1
                        if left <= 0:
                            break
            except TimeoutError:
                pass
            except grpc.aio.AioRpcError as error:
                assert kind == 0, error
                refused = "the deadline is in" in (error.details() or "")  # others' prompts take longer than that
                wanted = grpc.StatusCode.RESOURCE_EXHAUSTED if refused else grpc.StatusCode.DEADLINE_EXCEEDED
                assert error.code() is wanted, error
            finally:
                call.cancel()

        gate = asyncio.Semaphore(32)

        async def gated(number: int) -> None:
            async with gate:
                await one(number)

        await asyncio.gather(*(gated(number) for number in range(1000)))
        assert (await stack.client.tokens(range(3, 60), max_tokens=40)).token_ids == quiet.token_ids
        await stack.whole()
