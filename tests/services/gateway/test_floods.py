"""What can be done to a gateway with HTTP/2 itself: frames as fast as they can be sent. Neighbours' streams end well,
and nothing of it is left."""

import asyncio
import gc
import itertools
import struct
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from twostroke.services.gateway.doors import INFERENCE

from ...raw_http2 import PREFACE, frame, literal
from ..cluster import Cluster, cluster, text_request, token_ids, until
from ..stand_in_worker import Script, StandIn

DATA, HEADERS, PRIORITY, RESET, SETTINGS, PING, WINDOW, CONTINUATION = 0, 1, 2, 3, 4, 6, 8, 9
ENDS, HEAD_ENDS = 1, 4
CANCEL = struct.pack(">I", 8)
AT_ONCE = 25  # calls, or frames, a write
ENOUGH = 64 << 20  # bytes that a flood may cost

Flood = Callable[[], Iterator[bytes]]


def head(path: str = f"/{INFERENCE}/Generate") -> bytes:
    told = {b":method": b"POST", b":scheme": b"http", b":path": path.encode(), b":authority": b"test"}
    return b"".join(literal(*item) for item in {**told, b"content-type": b"application/grpc"}.items())


def calls(*, path: str = f"/{INFERENCE}/Generate", body: bool = False, reset: bool = True) -> Iterator[bytes]:
    """Opened, and taken back at once; with a whole request or none."""
    message = text_request(max_tokens=30).SerializeToString()
    data = frame(DATA, ENDS, 0, struct.pack(">BI", 0, len(message)) + message)
    for first in itertools.count(1, 2 * AT_ONCE):
        parts: list[bytes] = []
        for number in range(first, first + 2 * AT_ONCE, 2):
            parts.append(frame(HEADERS, HEAD_ENDS, number, head(path)))
            if body:
                parts.append(data[:5] + struct.pack(">I", number) + data[9:])
            if reset:
                parts.append(frame(RESET, 0, number, CANCEL))
        yield b"".join(parts)


def again(*frames: bytes) -> Iterator[bytes]:
    return itertools.repeat(b"".join(frames) * AT_ONCE)


def large_head() -> Iterator[bytes]:
    """One that does not end."""
    yield frame(HEADERS, 0, 1, head())
    while True:
        yield frame(CONTINUATION, 0, 1, literal(b"x-a", b"y" * 100) * AT_ONCE)


def empty_parts() -> Iterator[bytes]:
    yield frame(HEADERS, HEAD_ENDS, 1, head())
    yield from again(frame(DATA, 0, 1))


FLOODS: dict[str, Flood] = {
    "whole requests taken back": lambda: calls(body=True),
    "calls taken back": calls,
    "calls of nothing": lambda: calls(path="/no/thing", reset=False),
    "pings": lambda: again(frame(PING, 0, 0, b"12345678")),
    "settings": lambda: again(frame(SETTINGS, 0, 0, struct.pack(">HI", 4, 65_535))),
    "windows of nothing": lambda: again(frame(WINDOW, 0, 0, bytes(4))),
    "windows of a byte": lambda: again(frame(WINDOW, 0, 0, struct.pack(">I", 1))),
    "priorities": lambda: again(frame(PRIORITY, 0, 1, bytes(5))),
    "frames of no kind": lambda: again(frame(0x77, 0, 0, bytes(1000))),
    "a head without an end": large_head,
    "empty parts": empty_parts,
}


async def pour(address: str, flood: Flood, writes: int, *, reads: bool) -> None:
    """So many writes, over as many connections as it takes where the gateway ends one."""
    host, _, port = address.rpartition(":")
    while writes > 0:
        reader, writer = await asyncio.open_connection(host, int(port))
        reading = asyncio.create_task(reader.read(-1)) if reads else None
        try:
            with suppress(ConnectionError, TimeoutError):
                writer.write(PREFACE + frame(SETTINGS, 0, 0))
                for part in flood():
                    writes -= 1
                    if writes <= 0 or writer.transport.is_closing() or (reading is not None and reading.done()):
                        break
                    writer.write(part)
                    async with asyncio.timeout(5):  # who is not read does not read either
                        await writer.drain()
                    await asyncio.sleep(0)
        finally:
            if reading is not None:
                reading.cancel()
                await asyncio.gather(reading, return_exceptions=True)
            writer.transport.abort()


async def survive(it: Cluster, flood: Flood, writes: int, *, reads: bool = True, connections: int = 2) -> int:
    """Memory that it cost, in bytes."""
    process = psutil.Process()
    gc.collect()
    before = process.memory_info().rss
    attack = asyncio.gather(*(pour(it.address, flood, writes, reads=reads) for _ in range(connections)))
    attack = asyncio.ensure_future(attack)
    while True:
        over = attack.done()
        pieces = await it.collect(text_request(max_tokens=12), timeout=30)
        assert token_ids(pieces) == list(range(10, 22))
        if over:
            break
    await attack
    await it.idle()
    bounds = it.gateway.bounds
    await until(lambda: (bounds.calls.open, bounds.arrivals.taken, bounds.arrivals.waiting) == (0, 0, 0))
    return process.memory_info().rss - before


async def test_calls_that_are_taken_back_at_once(tiny_llama_dir: Path) -> None:
    async with cluster(tiny_llama_dir, StandIn("both", "w0", Script(pause_s=0.002))) as it:
        await survive(it, FLOODS["whole requests taken back"], 20)


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("reads", [True, False], ids=["read", "unread"])
@pytest.mark.parametrize("kind", FLOODS)
async def test_floods_of_frames(tiny_llama_dir: Path, kind: str, *, reads: bool) -> None:
    async with cluster(tiny_llama_dir, StandIn("both", "w0", Script(pause_s=0.002)), max_queue=200) as it:
        await survive(it, FLOODS["calls taken back"], 20)
        writes = 300 if "call" in kind or "requests" in kind else 3000
        assert await survive(it, FLOODS[kind], writes, reads=reads) < 2 * ENOUGH
