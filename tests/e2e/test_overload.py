"""More load than a stack takes: clients that come back when told to get their answers, the urgent ones first."""

import asyncio
import re
import time
from pathlib import Path

import grpc
import grpc.aio
import httpx2
import pytest

from twostroke.v1 import inference_pb2 as pb

from ..services.cluster import retry_s
from .harness import Answer, Launch, Stack, token_request

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
FLAGS = ("--dtype", "float32", "--kv-memory", "8MiB", "--max-batch", "4", "--max-queue-tokens", "8000", "--shm-dir")
COUNT = 80


def request_of(number: int) -> pb.GenerateRequest:
    """A fifth is urgent."""
    prompt = [3 + (number * 37 + at * 11) % 240 for at in range(200 + number % 7 * 40)]
    request = token_request(prompt, max_tokens=20 + number % 5 * 15)
    request.priority = -1 if number % 5 == 0 else 1
    return request


async def persistent(stack: Stack, number: int, refusals: list[float]) -> tuple[Answer, float]:
    """Comes back until it is served; the answer, and the time that this took."""
    began = time.monotonic()
    while True:
        try:
            return await stack.client.generate(request_of(number)), time.monotonic() - began
        except grpc.aio.AioRpcError as error:
            assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED, error
            assert 0.1 <= retry_s(error) <= 60
            refusals.append(retry_s(error))
            await asyncio.sleep(retry_s(error))


async def figure(stack: Stack, name: str) -> float:
    """Of /metrics."""
    async with httpx2.AsyncClient() as http:
        text = (await http.get(stack.http.removesuffix("/v1") + "/metrics")).text
    found = re.search(rf"^{name} (\S+)$", text, re.MULTILINE)
    assert found is not None, text
    return float(found[1])


async def test_all_are_served_in_the_end(launch: Launch, tiny_dir: Path, tmp_path: Path) -> None:
    async with launch("--model", str(tiny_dir), *FLAGS, str(tmp_path)) as stack:
        refusals: list[float] = []
        served = await asyncio.gather(*(persistent(stack, number, refusals) for number in range(COUNT)))
        assert refusals, "make the load higher"
        for number, (answer, _) in enumerate(served):
            assert len(answer.token_ids) == 20 + number % 5 * 15
        urgent = [seconds for number, (_, seconds) in enumerate(served) if number % 5 == 0]
        others = [seconds for number, (_, seconds) in enumerate(served) if number % 5]
        assert sum(urgent) / len(urgent) < sum(others) / len(others)
        assert await figure(stack, "twostroke_queue_tokens") == 0
        assert await figure(stack, "twostroke_queue_places") == 0
        assert await figure(stack, 'twostroke_queue_drain_rate{unit="tokens"}') > 0
        again = await stack.client.generate(request_of(3))
        assert again.token_ids == served[3][0].token_ids
        await stack.whole()
