"""Channels: how long a connection may take, and how soon it is tried again."""

import asyncio

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from twostroke.services.grpc_setup import CONNECT_MS, add_health_and_reflection, bind, create_server, open_channel
from twostroke.services.supervisor.machine import free_ports

from .cluster import refusal

Answer = health_pb2.HealthCheckResponse


async def test_a_slow_handshake_is_waited_for() -> None:
    """Of a server on a busy machine, or far away."""
    server = create_server()
    await add_health_and_reflection(server, ())
    late = bind(server, "127.0.0.1:0")
    await server.start()

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(1.3)
        there, back = await asyncio.open_connection(*late.split(":"))

        async def pump(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
            while data := await source.read(1 << 16):
                target.write(data)
            target.close()

        await asyncio.gather(pump(reader, back), pump(there, writer))

    front = await asyncio.start_server(pass_on, "127.0.0.1", 0)
    port = front.sockets[0].getsockname()[1]
    async with open_channel(f"127.0.0.1:{port}") as channel:
        call = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=30)
        assert (await call).status == Answer.NOT_SERVING
    front.close()
    await server.stop(None)


async def test_an_address_where_nobody_is_yet_is_tried_again_soon() -> None:
    (nowhere,) = free_ports(1)
    async with open_channel(f"127.0.0.1:{nowhere}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        assert (await refusal(stub.Check(health_pb2.HealthCheckRequest()))).code() is grpc.StatusCode.UNAVAILABLE
        second = create_server()
        await add_health_and_reflection(second, ())
        bind(second, f"127.0.0.1:{nowhere}")
        await second.start()
        async with asyncio.timeout(CONNECT_MS / 1000):
            await stub.Check(health_pb2.HealthCheckRequest(), wait_for_ready=True)
    await second.stop(None)
