"""HTTP/2 by hand: what gRPC's own client does not let a test do, such as a deadline that only the server keeps."""

import asyncio
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from google.protobuf.message import Message
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import (
    DataReceived,
    Event,
    PingAckReceived,
    ResponseReceived,
    StreamEnded,
    StreamReset,
    TrailersReceived,
)

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """One, whatever it says."""
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def literal(name: bytes, value: bytes) -> bytes:
    """A header by HPACK, as it is; each up to 126 bytes."""
    return b"\0%c%b%c%b" % (len(name), name, len(value), value)


@dataclass
class Call:
    """What came of one request."""

    number: int = 0  # of its stream
    headers: dict[str, str] = field(default_factory=dict)
    trailers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    reset: int | None = None  # the error code of RST_STREAM
    ended: bool = False

    @property
    def status(self) -> int | None:
        """gRPC's; None where there is none."""
        told = (self.trailers or self.headers).get("grpc-status")
        return None if told is None else int(told)


class Connection:
    """One connection in plaintext. `closed`: the other side ended it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._protocol = H2Connection(H2Configuration(client_side=True, header_encoding="utf-8"))
        self._protocol.initiate_connection()
        self._calls: dict[int, Call] = {}
        self._changed = asyncio.Condition()
        self._held: list[tuple[int, int]] | None = None  # bytes of streams that are not granted again
        self.closed = False
        self.pongs = 0
        self._flush()

    @property
    def most_calls(self) -> int:
        """At once, as the other side has told by now."""
        return self._protocol.remote_settings.max_concurrent_streams

    def _flush(self) -> None:
        self._writer.write(self._protocol.data_to_send())

    def call(self, path: str, message: Message, **headers: str) -> Call:
        """Sends a whole gRPC request; `headers` with _ for -."""
        data = message.SerializeToString()
        return self.begin(path, struct.pack(">BI", 0, len(data)) + data, ends=True, **headers)

    def begin(self, path: str, data: bytes, *, ends: bool = False, **headers: str) -> Call:
        """Sends these bytes of the body; `ends`: they are all."""
        number = self._protocol.get_next_available_stream_id()
        told = [(":method", "POST"), (":scheme", "http"), (":path", path), (":authority", "test"), ("te", "trailers")]
        told += [("content-type", "application/grpc"), *((k.replace("_", "-"), v) for k, v in headers.items())]
        self._protocol.send_headers(number, told)
        self._protocol.send_data(number, data, end_stream=ends)
        self._flush()
        self._calls[number] = Call(number)
        return self._calls[number]

    def more(self, call: Call, data: bytes, *, ends: bool = False) -> None:
        """Sends further bytes of its body."""
        self._protocol.send_data(call.number, data, end_stream=ends)
        self._flush()

    async def pour(self, call: Call, head: bytes, size: int, most: int = 1 << 14) -> None:
        """Sends `head` and so many zeros of its body, as the windows grant them, in frames of at most `most`; fewer
        where the call, or the connection, ends before."""
        size += len(head)
        while size and not call.ended and not self.closed:
            granted = min(size, most, self._protocol.local_flow_control_window(call.number))
            if granted > 0:
                data, head = head[:granted], head[granted:]
                self.more(call, data.ljust(granted, b"\0"))
                size -= granted
                await self._writer.drain()
                await asyncio.sleep(0)
            else:
                async with self._changed:
                    await self._changed.wait()

    def ping(self) -> None:
        """Its answer is counted in `pongs`."""
        self._protocol.ping(b"01234567")
        self._flush()

    def vanish(self) -> None:
        """Reads no more, so that nothing is answered; the connection stays open."""
        self._writer.transport.pause_reading()

    def hold(self) -> None:
        """Grants nothing more: what is sent fills the windows, and then waits."""
        self._held = []

    def release(self) -> None:
        """Grants all that was held, and goes on."""
        held, self._held = self._held or [], None
        for size, number in held:
            self._protocol.acknowledge_received_data(size, number)
        self._flush()

    async def read(self) -> None:
        """Takes in what comes, until the other side closes."""
        while data := await self._reader.read(1 << 16):
            for event in self._protocol.receive_data(data):
                self._take(event)
            self._flush()
            async with self._changed:
                self._changed.notify_all()
        async with self._changed:
            self.closed = True
            self._changed.notify_all()

    def _take(self, event: Event) -> None:
        if isinstance(event, PingAckReceived):
            self.pongs += 1
        call = self._calls.get(getattr(event, "stream_id", None) or 0)
        if call is None:
            return
        if isinstance(event, ResponseReceived):
            call.headers = {str(name): str(value) for name, value in event.headers}
        elif isinstance(event, TrailersReceived):
            call.trailers = {str(name): str(value) for name, value in event.headers}
        elif isinstance(event, DataReceived):
            call.body += event.data
            if self._held is not None:
                self._held.append((event.flow_controlled_length, event.stream_id))
            else:
                self._protocol.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
        elif isinstance(event, StreamReset):
            call.reset, call.ended = int(event.error_code), True
        elif isinstance(event, StreamEnded):
            call.ended = True

    async def end_of(self, call: Call, seconds: float = 30.0) -> None:
        """Waits for it; TimeoutError."""
        async with asyncio.timeout(seconds), self._changed:
            await self._changed.wait_for(lambda: call.ended or self.closed)


@asynccontextmanager
async def connected(address: str, source: str = "127.0.0.1") -> AsyncIterator[Connection]:
    """A connection to host:port, from `source`, that is read all the time."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port), local_addr=(source, 0))
    connection = Connection(reader, writer)
    reading = asyncio.create_task(connection.read())
    try:
        yield connection
    finally:
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        writer.close()
