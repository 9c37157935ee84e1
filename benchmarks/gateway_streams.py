"""Streams of a gateway under test, as its clients see them: many on few connections, counted, perhaps timed."""

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from http2 import Connection
from packed_worker import FIRST_NUMBER

from twostroke.v1 import inference_pb2 as pb

GENERATE = "/twostroke.v1.Inference/Generate"
MOST_TOKENS = 500_000


@dataclass
class Counts:
    """What all streams got. `waits`: until a number of tokens or events."""

    messages: int = 0
    tokens: int = 0
    bytes: int = 0
    got: dict[int, int] = field(default_factory=dict)  # tokens by stream
    failure: str = ""
    on_message: Callable[[int, int, int], None] | None = None  # stream, first index, tokens
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _wanted: Callable[[], bool] | None = None

    def add(self, stream: int, first: int, tokens: int, size: int) -> None:
        """A message."""
        self.messages += 1
        self.tokens += tokens
        self.bytes += size
        self.got[stream] = self.got.get(stream, 0) + tokens
        if self.on_message is not None:
            self.on_message(stream, first, tokens)
        self._changed.set()

    def fail(self, why: str) -> None:
        """A stream ended."""
        self.failure = self.failure or why
        self._changed.set()

    async def until(self, reached: Callable[[], bool]) -> None:
        """RuntimeError where a stream ends before. One waits at a time for each `Counts`."""
        while not reached():
            if self.failure:
                raise RuntimeError(f"a stream ended: {self.failure}")
            self._changed.clear()
            await self._changed.wait()


class GrpcStreams:
    """Streams `first` to `first + streams - 1` by native gRPC."""

    def __init__(self, address: str, path: str = GENERATE) -> None:
        self.counts = Counts()
        self._address = address
        self._path = path
        self._connections: list[Connection] = []

    async def open(self, numbers: range, connections: int) -> None:
        """Asks for all of them at once."""
        loop = asyncio.get_running_loop()
        host, _, port = self._address.rpartition(":")
        for _ in range(connections):
            _, connection = await loop.create_connection(lambda: Connection(self._address, self._take), host, int(port))
            self._connections.append(connection)
        for number in numbers:
            request = pb.GenerateRequest(
                input=pb.Input(token_ids=pb.TokenIds(ids=[FIRST_NUMBER + number])),
                stopping=pb.Stopping(max_tokens=MOST_TOKENS, ignore_eos=True),
            )
            connection = self._connections[number % connections]
            connection.call(number, self._path, request.SerializeToString())

    def close(self) -> None:
        """Ends all."""
        for connection in self._connections:
            connection.cancel_all()
            connection.close()

    def _take(self, number: int, message: bytes | None) -> None:
        if message is None:
            self.counts.fail(next((c.failure for c in self._connections if c.failure), "without a reason"))
            return
        answer = pb.GenerateResponse.FromString(message)
        self.counts.add(number, answer.first_index, len(answer.token_ids), len(message))


class _Sse(asyncio.Protocol):
    def __init__(self, number: int, counts: Counts) -> None:
        self._number = number
        self._counts = counts
        self._ended = False
        self._begun = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: asyncio.Transport = transport  # type: ignore[assignment]
        body = json.dumps(
            {"prompt": [FIRST_NUMBER + self._number], "max_tokens": MOST_TOKENS, "ignore_eos": True, "stream": True}
        ).encode()
        self.transport.write(
            b"POST /v1/completions HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\n\r\n" % len(body) + body
        )

    def data_received(self, data: bytes) -> None:
        if not self._begun:
            self._begun = True
            if not data.startswith(b"HTTP/1.1 200"):
                self._counts.fail(repr(data[:300]))
        events = data.count(b"\n\n") + (self._ended and data[:1] == b"\n")
        self._ended = data[-1:] == b"\n" and data[-2:] != b"\n\n"
        self._counts.bytes += len(data)
        if events:
            self._counts.messages += events - 1
            self._counts.add(self._number, 0, events, 0)

    def connection_lost(self, exc: Exception | None) -> None:
        self._counts.fail("the connection ended")


class SseStreams:
    """Streams of `/v1/completions`, a connection each. Tokens are counted as events."""

    def __init__(self, address: str) -> None:
        self.counts = Counts()
        self._address = address
        self._streams: list[_Sse] = []

    async def open(self, numbers: range) -> None:
        """Asks for all of them."""
        loop = asyncio.get_running_loop()
        host, _, port = self._address.rpartition(":")
        for number in numbers:
            _, stream = await loop.create_connection(lambda n=number: _Sse(n, self.counts), host, int(port))  # type: ignore[misc]
            self._streams.append(stream)

    def close(self) -> None:
        """Ends all."""
        for stream in self._streams:
            stream.transport.abort()


@dataclass
class Span:
    """Between two moments: seconds, the server's CPU seconds, messages, tokens."""

    seconds: float
    cpu: float
    messages: int
    tokens: int
    own: float  # CPU seconds of this process


class Watch:
    """Takes spans of a running server."""

    def __init__(self, cpu: Callable[[], float], counts: Counts) -> None:
        self._cpu = cpu
        self._counts = counts
        self._began = self._now()

    def span(self) -> Span:
        """Since the watch was made."""
        seconds, cpu, messages, tokens, own = (
            later - before for later, before in zip(self._now(), self._began, strict=True)
        )
        return Span(seconds, cpu, int(messages), int(tokens), own)

    def _now(self) -> tuple[float, ...]:
        counts = self._counts
        return time.perf_counter(), self._cpu(), counts.messages, counts.tokens, time.process_time()
