"""Servers and channels: health, reflection, limits, pings."""

import asyncio
from collections import Counter
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from twostroke.services.grpc_setup import (
    add_health_and_reflection,
    bind,
    channel_options,
    connection_limits,
    create_server,
    open_channel,
)

from ..raw_http2 import connected
from .cluster import refusal

SERVICE = "twostroke.v1.Inference"
Answer = health_pb2.HealthCheckResponse


async def test_health_of_the_process_and_of_its_service_move_together() -> None:
    server = create_server()
    health = await add_health_and_reflection(server, (SERVICE,))
    address = bind(server, "127.0.0.1:0")
    await server.start()
    async with open_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)

        async def status(service: str) -> int:
            return (await stub.Check(health_pb2.HealthCheckRequest(service=service))).status

        watch = stub.Watch(health_pb2.HealthCheckRequest(service=SERVICE))
        seen = aiter(watch)
        assert (await anext(seen)).status == Answer.NOT_SERVING
        assert [await status(""), await status(SERVICE)] == [Answer.NOT_SERVING] * 2
        await health.set_serving(True)
        assert (await anext(seen)).status == Answer.SERVING
        assert [await status(""), await status(SERVICE)] == [Answer.SERVING] * 2
        assert health.serving
        await health.shut_down()
        await health.set_serving(True)
        assert (await anext(seen)).status == Answer.NOT_SERVING
        assert await status("") == Answer.NOT_SERVING
        assert (
            await refusal(stub.Check(health_pb2.HealthCheckRequest(service="x")))
        ).code() is grpc.StatusCode.NOT_FOUND
        watch.cancel()
    await server.stop(None)


async def test_reflection_names_the_services() -> None:
    server = create_server()
    await add_health_and_reflection(server, (SERVICE,))
    address = bind(server, "127.0.0.1:0")
    await server.start()
    async with open_channel(address) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
        answer = await anext(aiter(call))
        names = {service.name for service in answer.list_services_response.service}
        call.cancel()
    assert names == {SERVICE, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}
    await server.stop(None)


async def test_a_port_is_had_by_one_server() -> None:
    server = create_server()
    address = bind(server, "127.0.0.1:0")
    await server.start()
    assert int(address.rpartition(":")[2]) > 0
    with pytest.raises(RuntimeError):
        bind(create_server(), address)
    await server.stop(None)


async def test_message_limit() -> None:
    server = create_server(max_message_bytes=1 << 16)
    await add_health_and_reflection(server, ())
    address = bind(server, "127.0.0.1:0")
    await server.start()
    async with open_channel(address) as channel:
        call = channel.unary_unary("/grpc.health.v1.Health/Check")
        assert (await refusal(call(b"x" * (1 << 17)))).code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    await server.stop(None)


async def test_a_client_that_pings_each_second_keeps_its_stream() -> None:
    """Default servers end it after three pings (too_many_pings)."""
    server = create_server()
    await add_health_and_reflection(server, ())
    address = bind(server, "127.0.0.1:0")
    await server.start()
    options = [*(option for option in channel_options() if option[0] != "grpc.keepalive_time_ms")]
    options.append(("grpc.keepalive_time_ms", 1000))
    async with grpc.aio.insecure_channel(address, options=options) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        seen = aiter(watch)
        await anext(seen)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5):
                await anext(seen)
    await server.stop(None)


async def test_pings_at_any_pace_end_nothing() -> None:
    """With a stream and without one; faster than what gRPC takes for abuse."""
    server = create_server(limits=connection_limits(metadata_bytes=16_384, streams=100, connections=100))
    await add_health_and_reflection(server, ())
    address = bind(server, "127.0.0.1:0")
    await server.start()
    for watches in (False, True):
        async with connected(address) as connection:
            if watches:
                connection.call("/grpc.health.v1.Health/Watch", health_pb2.HealthCheckRequest())
            for _ in range(20):
                connection.ping()
                await asyncio.sleep(0.02)
            async with asyncio.timeout(20):
                while connection.pongs < 20 and not connection.closed:
                    await asyncio.sleep(0.01)
            assert not connection.closed
    await server.stop(None)


async def test_a_client_that_vanished_is_noticed_and_one_that_is_only_silent_is_kept() -> None:
    server = create_server(limits=connection_limits(metadata_bytes=16_384, streams=100, connections=100, silent_s=0.5))
    ended = asyncio.Event()

    async def wait(_: bytes, context: Any) -> None:
        context.add_done_callback(lambda _: ended.set())
        await asyncio.Event().wait()

    handlers = {"Wait": grpc.unary_stream_rpc_method_handler(wait)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test", handlers),))
    address = bind(server, "127.0.0.1:0")
    await server.start()
    async with connected(address) as connection:
        connection.call("/test/Wait", health_pb2.HealthCheckRequest())
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(ended.wait(), 1.5)
        connection.vanish()
        await asyncio.wait_for(ended.wait(), 20)
    await server.stop(None)


async def test_a_burst_of_calls_is_taken_whole() -> None:
    """gRPC's own bound on calls that wait for the loop drops some of a burst, at random, as CANCELLED."""
    server = create_server()
    await add_health_and_reflection(server, ())
    address = bind(server, "127.0.0.1:0")
    await server.start()
    async with open_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        calls = [stub.Check(health_pb2.HealthCheckRequest(), timeout=60) for _ in range(3000)]
        codes = Counter([await call.code() for call in calls])
    await server.stop(None)
    assert codes == {grpc.StatusCode.OK: 3000}
