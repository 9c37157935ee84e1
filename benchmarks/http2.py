"""A gRPC client that costs a few microseconds a message, so that it can keep a server's core busy from another one.

Server-streaming calls in plaintext only: what HTTP/2 (RFC 9113) and HPACK's literals (RFC 7541) need of it, no more.
"""

import asyncio
import struct
from collections.abc import Callable
from typing import TypeAlias

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
END_STREAM, ACK, END_HEADERS = 0x1, 0x1, 0x4
INITIAL_WINDOW_SIZE, FIRST_WINDOW, MOST_WINDOW = 4, 65_535, (1 << 31) - 1
CANCEL = 8
RENEW_BYTES = 1 << 24

Taken: TypeAlias = Callable[[int, bytes | None], None]
"""Is told of each message of a call, and with None of the call's end."""


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """One frame."""
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def headers(fields: list[tuple[bytes, bytes]]) -> bytes:
    """Literals without indexing; names and values up to 126 bytes."""
    return b"".join(b"\0%c%b%c%b" % (len(name), name, len(value), value) for name, value in fields)


class Connection(asyncio.Protocol):
    """One connection. Calls are named by numbers of one's own."""

    def __init__(self, authority: str, taken: Taken) -> None:
        self._authority = authority.encode()
        self._taken = taken
        self._buffer = b""
        self._partial: dict[int, bytes] = {}
        self._calls: dict[int, int] = {}  # by stream
        self._next = 1
        self._unrenewed = 0
        self.failure = ""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Windows as large as they get."""
        self._transport: asyncio.Transport = transport  # type: ignore[assignment]
        self._transport.write(
            PREFACE
            + frame(SETTINGS, 0, 0, struct.pack(">HI", INITIAL_WINDOW_SIZE, MOST_WINDOW))
            + frame(WINDOW_UPDATE, 0, 0, struct.pack(">I", MOST_WINDOW - FIRST_WINDOW))
        )

    def call(self, number: int, path: str, message: bytes) -> None:
        """Begins a call."""
        stream, self._next = self._next, self._next + 2
        self._calls[stream] = number
        fields = [
            (b":method", b"POST"), (b":scheme", b"http"), (b":path", path.encode()), (b":authority", self._authority),
            (b"content-type", b"application/grpc"), (b"te", b"trailers"),
        ]  # fmt: skip
        body = b"\0" + struct.pack(">I", len(message)) + message
        self._transport.write(
            frame(HEADERS, END_HEADERS, stream, headers(fields)) + frame(DATA, END_STREAM, stream, body)
        )

    def cancel_all(self) -> None:
        """Ends every call."""
        gone = struct.pack(">I", CANCEL)
        if not self._transport.is_closing():
            self._transport.write(b"".join(frame(RST_STREAM, 0, stream, gone) for stream in self._calls))
        self._calls.clear()
        self._partial.clear()

    def close(self) -> None:
        """Ends the connection."""
        self._transport.abort()

    def data_received(self, data: bytes) -> None:
        """Takes whole frames."""
        buffer = self._buffer + data if self._buffer else data
        at, end = 0, len(buffer)
        while end - at >= 9:
            size = (buffer[at] << 16) + (buffer[at + 1] << 8) + buffer[at + 2]
            if end - at < 9 + size:
                break
            stream = int.from_bytes(buffer[at + 5 : at + 9], "big")
            self._take(buffer[at + 3], buffer[at + 4], stream, buffer[at + 9 : at + 9 + size])
            at += 9 + size
        self._buffer = buffer[at:]

    def connection_lost(self, exc: Exception | None) -> None:
        """All calls end."""
        for number in self._calls.values():
            self._taken(number, None)

    def _take(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == DATA:
            self._renew(len(payload))
            self._messages(stream, payload)
        elif kind == SETTINGS and not flags & ACK:
            self._transport.write(frame(SETTINGS, ACK, 0))
        elif kind == PING and not flags & ACK:
            self._transport.write(frame(PING, ACK, 0, payload))
        elif kind == GOAWAY:
            self.failure = repr(payload)
        if stream and (kind == RST_STREAM or (kind in (DATA, HEADERS) and flags & END_STREAM)):
            number = self._calls.pop(stream, None)
            if number is not None:
                self.failure = self.failure or repr(payload)
                self._taken(number, None)

    def _messages(self, stream: int, data: bytes) -> None:
        number = self._calls.get(stream)
        if number is None:
            return
        if kept := self._partial.pop(stream, b""):
            data = kept + data
        at, end = 0, len(data)
        while end - at >= 5:
            size = int.from_bytes(data[at + 1 : at + 5], "big")
            if end - at < 5 + size:
                break
            self._taken(number, data[at + 5 : at + 5 + size])
            at += 5 + size
        if at < end:
            self._partial[stream] = data[at:]

    def _renew(self, size: int) -> None:
        self._unrenewed += size
        if self._unrenewed >= RENEW_BYTES:
            self._transport.write(frame(WINDOW_UPDATE, 0, 0, struct.pack(">I", self._unrenewed)))
            self._unrenewed = 0
