"""Errors become statuses, over real gRPC, for every RPC kind."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest
from google.rpc import error_details_pb2

from twostroke.errors import (
    ConfigError,
    DeadlineExceeded,
    HandoverExpired,
    InvalidRequest,
    Mismatch,
    ModelNotFound,
    Overloaded,
    TwostrokeError,
    Unavailable,
)
from twostroke.services.field_count import FieldCount
from twostroke.services.grpc_setup import bind, create_server, open_channel
from twostroke.services.incoming import Arrival
from twostroke.services.interceptor import ErrorInterceptor, status_of
from twostroke.v1 import inference_pb2 as pb
from twostroke.v1 import worker_pb2

from .cluster import detail, field_of, refusal, retry_s

Code = grpc.StatusCode
REQUEST = pb.GenerateRequest(model="m")
LIMITED = Arrival(FieldCount(), request_s=20, idle_s=20)


class Handlers(grpc.GenericRpcHandler):
    """One method of each kind, which do what the test says."""

    def __init__(self, act: Callable[[Any, Any], Any]) -> None:
        self.act = act

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        act = self.act

        async def unary(request: Any, context: Any) -> Any:
            return await act(request, context)

        async def generator(request: Any, context: Any) -> AsyncIterator[Any]:
            yield pb.GenerateResponse(first_index=7)
            await act(request, context)

        async def writer(request: Any, context: Any) -> None:
            await context.write(pb.GenerateResponse(first_index=7))
            await act(request, context)

        async def reading(requests: AsyncIterator[Any], context: Any) -> Any:
            return await act([request async for request in requests], context)

        async def both(requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
            async for request in requests:
                yield pb.GenerateResponse(first_index=7)
                await act(request, context)

        codec = {
            "request_deserializer": pb.GenerateRequest.FromString,
            "response_serializer": pb.GenerateResponse.SerializeToString,
        }
        return {
            "/t/unary": grpc.unary_unary_rpc_method_handler(unary, **codec),
            "/t/generator": grpc.unary_stream_rpc_method_handler(generator, **codec),
            "/t/writer": grpc.unary_stream_rpc_method_handler(writer, **codec),
            "/t/reading": grpc.stream_unary_rpc_method_handler(reading, **codec),
            "/t/both": grpc.stream_stream_rpc_method_handler(both, **codec),
        }.get(details.method)


class Client:
    """Calls each method; returns what came before the end."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.channel = channel

    async def call(self, kind: str, request: bytes | None = None) -> list[int]:
        data = REQUEST.SerializeToString() if request is None else request
        read = pb.GenerateResponse.FromString
        if kind == "unary":
            return [(await self.channel.unary_unary("/t/unary", response_deserializer=read)(data)).first_index]
        if kind == "reading":
            return [(await self.channel.stream_unary("/t/reading", response_deserializer=read)([data])).first_index]
        if kind == "both":
            stream: Any = self.channel.stream_stream("/t/both", response_deserializer=read)([data])
        else:
            stream = self.channel.unary_stream(f"/t/{kind}", response_deserializer=read)(data)
        try:
            return [message.first_index async for message in stream]
        finally:
            stream.cancel()  # a task that is cancelled between two reads leaves its call running


@asynccontextmanager
async def served(act: Callable[[Any, Any], Any], arrival: Arrival | None = LIMITED) -> AsyncIterator[Client]:
    server = create_server((ErrorInterceptor(arrival),))
    server.add_generic_rpc_handlers((Handlers(act),))
    address = bind(server, "127.0.0.1:0")
    await server.start()
    async with open_channel(address) as channel:
        yield Client(channel)
    await server.stop(None)


def raising(error: BaseException) -> Callable[[Any, Any], Any]:
    async def act(request: Any, context: Any) -> Any:
        raise error

    return act


KINDS = ["unary", "generator", "writer", "reading", "both"]


@pytest.mark.parametrize("arrival", [None, LIMITED], ids=["trusted", "limited"])
@pytest.mark.parametrize("kind", KINDS)
async def test_every_kind_of_rpc(kind: str, arrival: Arrival | None) -> None:
    async with served(raising(Overloaded("full", retry_after_s=1.5)), arrival) as client:
        error = await refusal(client.call(kind))
    assert (error.code(), error.details()) == (Code.RESOURCE_EXHAUSTED, "full")
    assert retry_s(error) == 1.5
    info = detail(error, error_details_pb2.ErrorInfo)
    assert (info.reason, info.domain) == ("OVERLOADED", "twostroke")


@pytest.mark.parametrize("arrival", [None, LIMITED], ids=["trusted", "limited"])
@pytest.mark.parametrize("kind", KINDS)
async def test_what_succeeds_passes(kind: str, arrival: Arrival | None) -> None:
    async def act(request: Any, context: Any) -> pb.GenerateResponse:
        return pb.GenerateResponse(first_index=7)

    async with served(act, arrival) as client:
        assert await client.call(kind) == [7]


@pytest.mark.parametrize("kind", KINDS)
async def test_a_request_that_is_no_message_is_an_invalid_argument(kind: str) -> None:
    async def act(request: Any, context: Any) -> None:
        raise AssertionError("it must not run")

    bad = pb.GenerateRequest(model="abc").SerializeToString().replace(b"abc", b"a\xffc")
    async with served(act) as client:
        error = await refusal(client.call(kind, bad))
    assert error.code() is Code.INVALID_ARGUMENT
    assert "UTF-8" in (error.details() or "")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InvalidRequest("x", field="input.text"), Code.INVALID_ARGUMENT),
        (ModelNotFound("x"), Code.NOT_FOUND),
        (Overloaded("x"), Code.RESOURCE_EXHAUSTED),
        (Unavailable("x"), Code.UNAVAILABLE),
        (DeadlineExceeded("x"), Code.DEADLINE_EXCEEDED),
        (Mismatch("x"), Code.FAILED_PRECONDITION),
        (HandoverExpired("x"), Code.FAILED_PRECONDITION),
        (ConfigError("x"), Code.INTERNAL),
        (TwostrokeError("x"), Code.INTERNAL),
    ],
)
async def test_codes(error: TwostrokeError, code: grpc.StatusCode) -> None:
    async with served(raising(error)) as client:
        caught = await refusal(client.call("unary"))
    assert (caught.code(), caught.details()) == (code, "x")
    assert field_of(caught) == (error.field or "")
    assert retry_s(caught) == -1


async def test_an_unexpected_error_is_logged_by_type_and_place_without_its_text(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.ERROR):
        async with served(raising(ValueError("secret prompt"))) as client:
            error = await refusal(client.call("unary"))
    assert (error.code(), error.details()) == (Code.INTERNAL, "internal error (ValueError)")
    assert "ValueError" in caplog.text
    assert "test_interceptor.py" in caplog.text
    assert "secret" not in caplog.text


async def test_trailing_metadata_set_before_survives() -> None:
    async def act(request: Any, context: Any) -> Any:
        context.set_trailing_metadata((("x-request-id", "r1"),))
        raise Unavailable("x", retry_after_s=0.25)

    async with served(act) as client:
        error = await refusal(client.call("writer"))
    assert dict(error.trailing_metadata())["x-request-id"] == "r1"
    assert retry_s(error) == 0.25


async def test_a_handler_s_own_abort_passes() -> None:
    async def act(request: Any, context: Any) -> Any:
        await context.abort(Code.ALREADY_EXISTS, "mine")

    async with served(act) as client:
        error = await refusal(client.call("unary"))
    assert (error.code(), error.details()) == (Code.ALREADY_EXISTS, "mine")


async def test_a_cancelled_call_cancels_the_handler() -> None:
    ended, started = asyncio.Event(), asyncio.Event()

    async def act(request: Any, context: Any) -> Any:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async with served(act) as client:
        for kind in KINDS:
            started.clear()
            ended.clear()
            task = asyncio.create_task(client.call(kind))
            await started.wait()
            task.cancel()
            await ended.wait()


async def test_unknown_methods_stay_unknown() -> None:
    async with served(raising(ValueError())) as client:
        error = await refusal(client.channel.unary_unary("/t/other")(b""))
    assert error.code() is Code.UNIMPLEMENTED


def test_a_status_is_short() -> None:
    status = status_of(InvalidRequest("x" * 100_000, field="input"))
    assert len(status.SerializeToString()) < 4000
    assert worker_pb2.Failure(message=status.message).message
