"""Requests of which all but the end is there, very many at once: what they hold is bounded, and neighbours go on."""

import asyncio
import gc
import struct
from collections import Counter
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import psutil
import pytest

from twostroke.services.gateway.doors import INFERENCE, OPEN_INFERENCE

from ...raw_http2 import Call, Connection, connected
from ..cluster import Cluster, cluster, text_request, token_ids, until
from ..stand_in_worker import Script, StandIn

MIB = 1 << 20
OTHERS = "127.0.0.2"  # their address; neighbours have another
FULL = grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
LATE = grpc.StatusCode.DEADLINE_EXCEEDED.value[0]
METHODS = (
    f"/{INFERENCE}/Generate",
    f"/{INFERENCE}/Tokenize",
    f"/{OPEN_INFERENCE}/ModelStreamInfer",
    "/grpc.health.v1.Health/Check",
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
)


async def half(connection: Connection, path: str, size: int) -> Call:
    """All of a message of so many bytes but the last one."""
    call = connection.begin(path, b"")
    await connection.pour(call, struct.pack(">BI", 0, size), size - 1)
    await connection.end_of(call, 60)
    return call


async def neighbour(it: Cluster) -> None:
    """It does not wait for what others have waiting."""
    pieces = await it.collect(text_request(max_tokens=5), timeout=10)
    assert token_ids(pieces) == list(range(10, 15))


def settled(it: Cluster) -> bool:
    bounds = it.gateway.bounds
    return (bounds.arrivals.taken, bounds.arrivals.waiting, bounds.calls.open) == (0, 0, 0)


async def half_sent(it: Cluster, connections: int, streams: int, size: int) -> int:
    """Most memory beyond what there was, in bytes."""
    gc.collect()
    process = psutil.Process()
    before, most = process.memory_info().rss, 0
    statuses: Counter[int | None] = Counter()

    async def flood() -> None:
        async with connected(it.address, OTHERS) as connection:
            calls = [half(connection, METHODS[number % len(METHODS)], size) for number in range(streams)]
            statuses.update(call.status for call in await asyncio.gather(*calls))

    floods = [asyncio.create_task(flood()) for _ in range(connections)]
    while not all(task.done() for task in floods):
        await neighbour(it)
        most = max(most, process.memory_info().rss - before)
    await asyncio.gather(*floods)
    assert statuses.keys() == {FULL, LATE}, statuses
    await it.idle()
    await until(lambda: settled(it))
    return most


async def test_a_few_give_way_to_others(tiny_llama_dir: Path) -> None:
    async with cluster(
        tiny_llama_dir,
        StandIn("both", "w0", Script()),
        max_message_bytes=MIB,
        arriving_bytes=4 * MIB,
        request_s=4,
        stream_idle_s=4,
    ) as it:
        await half_sent(it, 2, 5, MIB // 2)


@pytest.mark.slow
async def test_memory_of_half_sent_messages_is_bounded(tiny_llama_dir: Path) -> None:
    """800 of nearly 4 MiB: 3 GiB, were it not."""
    budget = 64 * MIB
    worker = StandIn("both", "w0", Script())
    async with cluster(tiny_llama_dir, worker, arriving_bytes=budget, request_s=6, stream_idle_s=6) as it:
        assert await half_sent(it, 8, 100, 4 * MIB - 10) < 3 * budget
        assert await half_sent(it, 8, 100, 4 * MIB - 10) < 3 * budget  # nothing is left of the first ones


async def body(it: Cluster, size: int) -> int:
    """The status of a request over HTTP whose body lacks its last byte; 0: the connection was reset."""
    host, _, port = it.gateway.http_address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port), local_addr=(OTHERS, 0))
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {size}\r\n\r\n"
    )
    try:
        writer.write(head.encode())
        for at in range(0, size - 1, 1 << 16):
            writer.write(bytes(min(1 << 16, size - 1 - at)))
            await writer.drain()
        line = await reader.readline()
        return int(line.split()[1]) if line else 0
    except ConnectionError:
        return 0
    finally:
        writer.close()


@pytest.mark.parametrize("count", [8, pytest.param(400, marks=pytest.mark.slow)])
async def test_bodies_over_http_that_lack_their_end(tiny_llama_dir: Path, count: int) -> None:
    size = 4 * MIB - 10 if count > 100 else MIB // 2
    settings: dict[str, Any] = {"max_message_bytes": size, "arriving_bytes": 16 * MIB if count > 100 else 4 * size}
    async with cluster(tiny_llama_dir, StandIn("both", "w0", Script()), request_s=2, stream_idle_s=2, **settings) as it:
        process = psutil.Process()
        before, most = process.memory_info().rss, 0
        bodies = [asyncio.create_task(body(it, size)) for _ in range(count)]
        while not all(task.done() for task in bodies):
            await neighbour(it)
            most = max(most, process.memory_info().rss - before)
        seen = Counter([task.result() for task in bodies])
        assert set(seen) <= {429, 408, 0}, seen
        assert seen[429] or count > 100  # of many most come too late for a place
        assert most < 3 * 16 * MIB + count * (3 << 17)
        await until(lambda: settled(it))


async def test_calls_at_once_are_bounded_over_all_connections(tiny_llama_dir: Path) -> None:
    """Whoever has most leaves some to others; health is asked by somebody else."""
    async with (
        cluster(tiny_llama_dir, StandIn("both", "w0", Script()), max_calls=8, request_s=30) as it,
        connected(it.address) as one,
        connected(it.address) as two,
    ):
        held = [each.begin("/grpc.health.v1.Health/Watch", b"\0\0\0\0\0") for each in (one, two) for _ in range(3)]
        await until(lambda: it.gateway.bounds.calls.open == 6)
        more = two.begin("/grpc.health.v1.Health/Watch", b"\0\0\0\0\0")
        await two.end_of(more)
        assert more.status == FULL
        assert not any(call.ended for call in held)
    await until(lambda: settled(it))
