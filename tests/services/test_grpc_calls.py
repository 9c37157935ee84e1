"""Ends of streams, against a real server."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
import pytest

from twostroke.services.grpc_calls import end, write_failed
from twostroke.services.grpc_setup import create_server, open_channel

from .cluster import until


class Echo(grpc.GenericRpcHandler):
    """Answers `many` with a hundred messages and the stream's end, `end` with its end, and all else not at all."""

    def __init__(self) -> None:
        self.ended = 0

    def service(self, _: Any) -> Any:
        return grpc.stream_stream_rpc_method_handler(self._serve)  # type: ignore[arg-type]

    async def _serve(self, requests: AsyncIterator[bytes], context: Any) -> None:
        try:
            async for request in requests:
                if request == b"many":
                    for _ in range(100):
                        await context.write(b"x" * 100)
                if request in (b"many", b"end"):
                    await context.abort(grpc.StatusCode.UNAVAILABLE, "bye")
        finally:
            self.ended += 1


@asynccontextmanager
async def echo() -> AsyncIterator[tuple[Echo, str]]:
    handler, server = Echo(), create_server(())
    server.add_generic_rpc_handlers((handler,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield handler, f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


async def written_to_its_end(call: Any) -> grpc.aio.AioRpcError:
    """Writes and reads nothing until the other end is gone."""
    try:
        while True:
            await call.write(b"more")
    except grpc.aio.AioRpcError as error:
        return error


@pytest.mark.parametrize("state", ["a write failed", "running", "ended", "new"])
async def test_nothing_is_left_of_a_stream(state: str) -> None:
    before = asyncio.all_tasks()
    async with echo() as (handler, address):
        async with open_channel(address) as channel:
            call: Any = channel.stream_stream("/a/b")()
            if state != "new":
                await call.write(b"hello")
            if state == "ended":
                await call.write(b"end")
                assert await call.code() is grpc.StatusCode.UNAVAILABLE
            if state == "a write failed":
                await call.write(b"many")
                error = await written_to_its_end(call)
                assert error.code() is grpc.StatusCode.INTERNAL
                assert write_failed(error.details() or "")
                assert not call.cancel()
            end(call)
            end(call)
        if state != "new":
            await until(lambda: handler.ended == 1)
    await until(lambda: asyncio.all_tasks() <= before)
