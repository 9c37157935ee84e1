"""What gRPC has completed, handed to the loop in one go.

A thread of grpc.aio's writes a byte into a socket pair for each completed read or write; what it calls on the loop
takes one byte, and all completions that are there. The bytes left over make the loop come round once each for nothing,
and once the pair is full (278 bytes, here) that thread waits, and every call with it: a busy loop then reads a worker's
next step about every 12 ms, whatever waits. So the end that is read gives all of its bytes at once.
"""

import socket
from collections.abc import Iterator
from contextlib import contextmanager

import grpc.aio

ALL = 1 << 16  # more than a socket pair holds


class _Emptied(socket.socket):
    """Reads what there is, however little it is asked for."""

    def recv(self, bufsize: int, flags: int = 0, /) -> bytes:
        return super().recv(max(bufsize, ALL), flags)


def take_together() -> None:
    """For this process; on the loop that will serve, before its first channel or server. Changes nothing where gRPC
    was begun already, or does it in another way."""
    with _pairs_of_emptied():
        grpc.aio.init_grpc_aio()


@contextmanager
def _pairs_of_emptied() -> Iterator[None]:
    """gRPC makes its pair when it is begun, and offers no other way to it."""
    plain = socket.socketpair

    def pair() -> tuple[socket.socket, socket.socket]:
        read, write = plain()
        return _Emptied(fileno=read.detach()), write

    socket.socketpair = pair  # type: ignore[assignment]
    try:
        yield
    finally:
        socket.socketpair = plain
