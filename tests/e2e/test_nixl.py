"""A stack whose KV goes by NIXL over TCP, as between hosts: real text, cancels, and death of either worker."""

import asyncio
import contextlib
import random
import signal
from pathlib import Path

import pytest

from twostroke.kvtransfer.nixl_agent import why_missing
from twostroke.v1 import inference_pb2 as pb

from .harness import Answer, Launch, Stack, token_request
from .test_standalone import listed

pytestmark = pytest.mark.skipif(bool(why_missing()), reason=why_missing() or "there")

FLAGS = ("--dtype", "float32", "--transport", "nixl")
SMALL = (*FLAGS, "--kv-memory", "32MiB", "--shm-dir")


@pytest.fixture(autouse=True)
def _tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within one host UCX would take shorter ways."""
    monkeypatch.setenv("UCX_TLS", "tcp")


def text_request(text: str) -> pb.GenerateRequest:
    """Greedy."""
    stopping = pb.Stopping(max_tokens=12)
    return pb.GenerateRequest(input=pb.Input(text=text), sampling=pb.Sampling(temperature=0.0), stopping=stopping)


async def over_nixl(stack: Stack) -> float:
    """GB/s of the one pair, as `twostroke workers list --json` has it; a status comes once a second."""
    async with asyncio.timeout(20):
        while True:
            workers = await listed(stack.address)
            if pairs := workers["prefill-0"]["transports"]:
                break
            await asyncio.sleep(0.3)
    [pair] = pairs
    assert pair["transport"] == "nixl"
    assert pair["decode_incarnation"] == workers["decode-0"]["incarnation"]
    return float(pair["gb_per_s"])


async def test_real_text(launch: Launch, smollm2_dir: Path) -> None:
    async with launch("--model", str(smollm2_dir), *FLAGS, "--kv-memory", "256MiB") as stack:
        await stack.joined(prefill=1, decode=1)
        answer = await stack.client.generate(text_request("1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13,"))
        assert (answer.finish.prefill_worker, answer.finish.decode_worker) == ("prefill-0", "decode-0")
        assert answer.text.startswith(" 14, 15, 16")
        assert await over_nixl(stack) > 0
        await stack.whole()


async def test_cancelled_requests_leave_nothing(launch: Launch, tiny_dir: Path, tmp_path: Path) -> None:
    chance = random.Random(7)
    async with launch("--model", str(tiny_dir), *SMALL, str(tmp_path), "--token-budget", "64") as stack:
        await stack.joined(prefill=1, decode=1)
        quiet = await stack.client.tokens(range(3, 60), max_tokens=40)

        async def one(number: int) -> None:
            prompt = [3 + (number * 7 + i) % 240 for i in range(chance.choice((15, 17, 200, 900)))]
            call = stack.client.call(token_request(prompt, max_tokens=200), timeout=60)
            await asyncio.sleep(chance.random() * 0.3)
            call.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                async for _ in call:
                    pass

        for _ in range(4):
            await asyncio.gather(*(one(number) for number in range(10)))
        assert (await stack.client.tokens(range(3, 60), max_tokens=40)).token_ids == quiet.token_ids
        await stack.whole()


@pytest.mark.parametrize("victim", ["prefill-0", "decode-0"])
async def test_a_killed_worker_costs_no_stream_anything(
    launch: Launch, tiny_dir: Path, tmp_path: Path, victim: str
) -> None:
    async with launch("--model", str(tiny_dir), *SMALL, str(tmp_path)) as stack:
        await stack.joined(prefill=1, decode=1)

        async def stream(number: int, flows: asyncio.Event | None = None) -> Answer:
            answer = Answer()
            async for message in stack.client.call(token_request([number + 3, 9, 17] * 30, max_tokens=600)):
                answer.take(message)
                if flows is not None:
                    flows.set()
            return answer

        quiet = [(await stream(number)).token_ids for number in range(4)]
        flowing = [asyncio.Event() for _ in quiet]
        streams = [asyncio.create_task(stream(number, flows)) for number, flows in enumerate(flowing)]
        await flowing[0].wait()
        pid = stack.signal(victim, signal.SIGKILL)
        assert [answer.token_ids for answer in await asyncio.gather(*streams)] == quiet
        await stack.event("ready", victim, after_pid=pid)
        await stack.joined(prefill=1, decode=1)
        again = await stream(0)
        assert again.token_ids == quiet[0]
        assert (again.finish.prefill_worker, again.finish.decode_worker) == ("prefill-0", "decode-0")
        await over_nixl(stack)
        await stack.whole()
