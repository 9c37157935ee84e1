"""The health probe against real servers, present, absent and frozen."""

import asyncio

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio

from twostroke.services.supervisor.health import Condition, HealthProbe, check_once
from twostroke.services.supervisor.machine import free_ports

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def start(address: str) -> tuple[grpc.aio.Server, health_aio.HealthServicer]:
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    servicer = health_aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    server.add_insecure_port(address)
    await server.start()
    return server, servicer


async def test_a_process_through_its_life() -> None:
    address = f"127.0.0.1:{free_ports(1)[0]}"
    probe = HealthProbe(address)
    try:
        assert await probe.check(1) is Condition.SILENT
        server, servicer = await start(address)
        await servicer.set("", NOT_SERVING)
        async with asyncio.timeout(10):
            while await probe.check(1) is Condition.SILENT:  # the channel backs off for a moment
                await asyncio.sleep(0.02)
        assert await probe.check(1) is Condition.NOT_SERVING
        await servicer.set("", SERVING)
        assert await probe.check(1) is Condition.SERVING
        assert await probe.check(1, "twostroke.v1.Unknown") is Condition.NOT_SERVING
        await servicer.set("twostroke.v1.Inference", SERVING)
        assert await probe.check(1, "twostroke.v1.Inference") is Condition.SERVING
        await server.stop(0)
        assert await probe.check(1) is Condition.SILENT
        server, _ = await start(address)
        async with asyncio.timeout(10):
            while await probe.check(1) is not Condition.SERVING:  # a new process at the same address
                await asyncio.sleep(0.02)
        await server.stop(0)
    finally:
        await probe.close()


async def test_a_listener_that_says_nothing() -> None:
    gone = asyncio.Event()

    async def hold(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await gone.wait()
        writer.close()

    server = await asyncio.start_server(hold, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    try:
        assert await asyncio.wait_for(check_once(f"127.0.0.1:{port}", 0.3), 5) is Condition.SILENT
    finally:
        gone.set()
        server.close()


@pytest.mark.parametrize("known", [True, False])
async def test_a_server_without_health_lives(known: bool) -> None:
    server = grpc.aio.server()
    if known:
        health_pb2_grpc.add_HealthServicer_to_server(health_aio.HealthServicer(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        expected = Condition.SERVING if known else Condition.NOT_SERVING
        assert await check_once(f"127.0.0.1:{port}", 2) is expected
    finally:
        await server.stop(0)
