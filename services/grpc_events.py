"""What gRPC has completed, handed to the loop in one go, and no sooner than the loop asks for it.

A thread of grpc.aio's (here: the poller) takes each completed read or write from gRPC and writes a byte into a socket
pair; what it calls on the loop takes one byte, and all completions that are there. That costs twice:

- The bytes left over make the loop come round once each for nothing, and once the pair is full (278 bytes, here) the
  poller waits, and every call with it: a busy loop then reads a worker's next step about every 12 ms, whatever waits.
  So the end that is read gives all of its bytes at once.
- A write is complete as soon as it was begun, and wakes the poller, which on the loop's own core takes its place at
  once, finds gRPC's lock taken, waits, and is woken again: a third of a stream's cost. So once the loop has taken what
  there is, the pair is filled up: the poller waits at its next byte. What follows from a completion takes the loop
  several rounds; only then does it ask for more, and only where that brings nothing may it sleep.
"""

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import grpc.aio

ALL = 1 << 18  # more than a socket pair holds
OPEN = 1 << 20  # bytes of buffer; a byte takes 768; the system makes it its most
SHUT = 1  # the system makes it its least
FILL = b"\0" * 4096  # more than that least holds
ROUNDS = 3  # of the loop, from a step that is read until its messages are written
SOON_S = 0.0002  # a longer round has work enough to ask what else there is: steps that wait to be read are joined
BYTE = b"1"  # what the poller writes


class _Gate(socket.socket):
    """The end that is read. Takes what there is, however little it is asked for."""

    filled: socket.socket  # the other end
    rounds = 0  # of the loop before it asks again, where they are short
    asked = 0.0  # when

    def recv(self, bufsize: int, flags: int = 0, /) -> bytes:
        """Lets the poller bring all that has completed; it waits from then on, unless there was nothing."""
        now = time.perf_counter()
        if self.rounds and now - self.asked < SOON_S:
            self.rounds -= 1
            return b""
        self.asked = now
        self.filled.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, OPEN)
        data = super().recv(ALL, flags)
        self.rounds = ROUNDS if BYTE in data else 0
        if self.rounds:
            self.filled.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SHUT)
            with suppress(BlockingIOError):  # it is full already
                self.filled.send(FILL, socket.MSG_DONTWAIT)
        return data


def take_together() -> None:
    """For this process; on the loop that will serve, before its first channel or server. Changes nothing where gRPC
    was begun already, or does it in another way."""
    with _gated_pairs():
        grpc.aio.init_grpc_aio()


@contextmanager
def _gated_pairs() -> Iterator[None]:
    """gRPC makes its pair when it is begun, and offers no other way to it."""
    plain = socket.socketpair

    def pair() -> tuple[socket.socket, socket.socket]:
        read, write = plain()
        gate = _Gate(fileno=read.detach())
        gate.filled = write
        return gate, write

    socket.socketpair = pair  # type: ignore[assignment]
    try:
        yield
    finally:
        socket.socketpair = plain
