"""Completions are taken together: in a process of its own, as gRPC is begun once for each."""

import asyncio
import socket
import sys

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


def test_other_pairs_are_plain() -> None:
    left, right = socket.socketpair()
    with left, right:
        assert type(left) is socket.socket
