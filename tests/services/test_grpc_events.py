"""Completions are taken together: in a process of its own, as gRPC is begun once for each."""

import asyncio
import socket
import sys
from select import select

import pytest

from twostroke.services import grpc_events

PROGRAM = """
import asyncio, socket
import grpc.aio
import uvloop
from twostroke.services import grpc_events
from twostroke.services.grpc_setup import bind, create_server, open_channel

STREAMS, MESSAGES = 100, 20
calls = 0
recv = grpc_events._Gate.recv

def counted(self, *size):
    global calls
    calls += 1
    return recv(self, *size)

grpc_events._Gate.recv = counted

async def stream(request, context):
    for _ in range(MESSAGES):
        await context.write(request)

async def main():
    before = socket.socketpair
    grpc_events.take_together()
    assert socket.socketpair is before
    server = create_server()
    handlers = {"Stream": grpc.unary_stream_rpc_method_handler(stream)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test", handlers),))
    address = bind(server, "127.0.0.1:0")
    await server.start()
    async with open_channel(address) as channel:
        async def one(number):
            return [answer async for answer in channel.unary_stream("/test/Stream")(b"%d" % number)]
        answers = await asyncio.gather(*(one(number) for number in range(STREAMS)))
    await server.stop(None)
    assert answers == [[b"%d" % number] * MESSAGES for number in range(STREAMS)]
    print(calls)

uvloop.run(main())
"""


async def test_the_loop_is_called_less_often_than_messages_are_written_and_read() -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PROGRAM, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    told, failed = await process.communicate()
    assert process.returncode == 0, failed.decode()[-2000:]
    assert 0 < int(told) < 2 * 100 * 20, "a call for each message"


def test_what_completed_is_asked_for_after_some_rounds_and_the_poller_waits_meanwhile() -> None:
    with grpc_events._gated_pairs():
        read, write = socket.socketpair()
    with read, write:
        read.setblocking(False)
        write.send(b"1" * 3)
        assert read.recv(1).count(b"1") == 3
        with pytest.raises(BlockingIOError):  # the poller's next byte
            write.send(b"1", socket.MSG_DONTWAIT)
        for _ in range(grpc_events.ROUNDS):
            assert select([read], [], [], 0)[0], "the loop would sleep"
            assert read.recv(1) == b""
        assert b"1" not in read.recv(1)
        assert not select([read], [], [], 0)[0], "the loop must be able to sleep"
        write.send(b"1", socket.MSG_DONTWAIT)
        assert b"1" in read.recv(1)


def test_other_pairs_are_plain() -> None:
    left, right = socket.socketpair()
    with left, right:
        assert type(left) is socket.socket
