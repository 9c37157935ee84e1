"""Turns the exception tree into gRPC statuses, for every RPC of a server: the one place where that is done."""

import asyncio
import inspect
import logging
import math
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any, TypeAlias

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]

from ..errors import (
    DeadlineExceeded,
    HandoverExpired,
    InvalidRequest,
    Mismatch,
    ModelNotFound,
    Overloaded,
    PermissionDenied,
    RunningAlready,
    TwostrokeError,
    Unauthenticated,
    Unavailable,
    Unsupported,
    WorkerNotFound,
    WrongState,
)

DOMAIN = "twostroke"
DETAILS_KEY = "grpc-status-details-bin"
ABORT_S = 1.0  # a client that reads nothing must not keep the call's task: the status stays queued in its transport
MAX_DETAILS = 1000  # characters; a status travels in headers

CODES: tuple[tuple[type[TwostrokeError], grpc.StatusCode], ...] = (
    (InvalidRequest, grpc.StatusCode.INVALID_ARGUMENT),
    (ModelNotFound, grpc.StatusCode.NOT_FOUND),
    (WorkerNotFound, grpc.StatusCode.NOT_FOUND),
    (Unauthenticated, grpc.StatusCode.UNAUTHENTICATED),
    (PermissionDenied, grpc.StatusCode.PERMISSION_DENIED),
    (RunningAlready, grpc.StatusCode.ALREADY_EXISTS),
    (Unsupported, grpc.StatusCode.UNIMPLEMENTED),
    (WrongState, grpc.StatusCode.FAILED_PRECONDITION),
    (Overloaded, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (Unavailable, grpc.StatusCode.UNAVAILABLE),
    (DeadlineExceeded, grpc.StatusCode.DEADLINE_EXCEEDED),
    (Mismatch, grpc.StatusCode.FAILED_PRECONDITION),
    (HandoverExpired, grpc.StatusCode.FAILED_PRECONDITION),
)

Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]
Behaviour: TypeAlias = Callable[[Any, Context], Any]
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any] | None"  # generic in the stubs only

logger = logging.getLogger(__name__)


class _Malformed:
    """Stands for a request that is no valid message, until the handler's turn to refuse it."""


def code_of(error: TwostrokeError) -> grpc.StatusCode:
    """INTERNAL for what is not in the table."""
    return next((code for kind, code in CODES if isinstance(error, kind)), grpc.StatusCode.INTERNAL)


def status_of(error: TwostrokeError) -> status_pb2.Status:
    """The rich status: ErrorInfo always, BadRequest where a field is named, RetryInfo where a time is known."""
    details: list[Message] = [error_details_pb2.ErrorInfo(reason=reason_of(error), domain=DOMAIN)]
    message = error.message[:MAX_DETAILS]
    if error.field is not None:
        violation = error_details_pb2.BadRequest.FieldViolation(field=error.field, description=message)
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    if error.retry_after_s is not None and math.isfinite(error.retry_after_s):
        delay = duration_pb2.Duration(nanos=0)
        delay.FromMilliseconds(max(0, round(error.retry_after_s * 1000)))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    status = status_pb2.Status(code=code_of(error).value[0], message=message)
    for detail in details:
        packed = any_pb2.Any()
        packed.Pack(detail)
        status.details.append(packed)
    return status


def reason_of(error: TwostrokeError) -> str:
    """HandoverExpired -> HANDOVER_EXPIRED."""
    name = type(error).__name__
    return "".join(f"_{c}" if c.isupper() and i else c for i, c in enumerate(name)).upper()


async def abort(context: Context, error: TwostrokeError) -> None:
    """Ends the call with the error's status; never returns normally (raises grpc's AbortError)."""
    status = status_of(error)
    # abort() replaces the trailing metadata set before: carry them over.
    trailing = [*(context.trailing_metadata() or ()), (DETAILS_KEY, status.SerializeToString())]
    try:
        async with asyncio.timeout(ABORT_S):
            await context.abort(code_of(error), status.message, tuple(trailing))
    except TimeoutError:
        raise _over() from None  # the client does not read
    except grpc.aio.InternalError:  # the call ended meanwhile: its deadline passed, or the client is gone
        raise _over() from None


def _over() -> asyncio.CancelledError:
    """What ends a handler whose call is over already: grpc takes a cancel in silence, and only its own AbortError."""
    return asyncio.CancelledError("the call is over")


def unexpected(error: Exception, method: str) -> TwostrokeError:
    """What to tell of a fault of ours. Logs the place and the type, but not the message: it may quote a prompt."""
    stack = "".join(traceback.format_tb(error.__traceback__))
    logger.error("%s failed: %s at\n%s", method, type(error).__qualname__, stack)
    return TwostrokeError(f"internal error ({type(error).__name__})")


async def _guarded(work: Awaitable[Any], context: Context, method: str) -> Any:
    """Awaits a handler and maps what it raises."""
    try:
        return await work
    except TwostrokeError as error:
        await abort(context, error)
    except grpc.aio.AbortError:
        raise
    except grpc.aio.InternalError:
        raise _over() from None
    except Exception as error:
        if context.cancelled() or context.done():
            raise
        await abort(context, unexpected(error, method))


async def _checked(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
    async for request in requests:
        _check(request)
        yield request


def _check(request: Any) -> None:
    if isinstance(request, _Malformed):
        raise InvalidRequest("the request is not a valid message (a text field may hold malformed UTF-8)")


def _wrap(behaviour: Behaviour, method: str, *, streams_in: bool, streams_out: bool) -> Behaviour:
    """The same handler with its errors mapped; the request is checked first.

    A streaming handler may be an async generator, or a coroutine function that calls `context.write`.
    """

    async def call(request: Any, context: Context) -> Any:
        if not streams_in:
            _check(request)
        return await behaviour(_checked(request) if streams_in else request, context)

    async def pump(request: Any, context: Context) -> None:
        if not streams_in:
            _check(request)
        answers = behaviour(_checked(request) if streams_in else request, context)
        try:
            async for answer in answers:
                await context.write(answer)
        finally:
            await answers.aclose()

    inner = pump if streams_out and inspect.isasyncgenfunction(behaviour) else call

    async def guarded(request: Any, context: Context) -> Any:
        return await _guarded(inner(request, context), context, method)

    return guarded


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Give it to `create_server`; one for all RPC kinds."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        """Wraps the method's handler; methods of others' making (health, reflection) too."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        wrap = partial(
            _wrap,
            method=handler_call_details.method,
            streams_in=bool(handler.request_streaming),
            streams_out=bool(handler.response_streaming),
        )
        return rewrapped(handler, wrap, _tolerant(handler.request_deserializer))


def rewrapped(
    handler: "grpc.RpcMethodHandler[Any, Any]",
    wrap: Callable[[Behaviour], Behaviour],
    read: Callable[[bytes], Any] | None,
) -> Handler:
    """A handler of the same kind around `wrap` of the method; `read`: its request's deserializer."""
    kind = "_".join("stream" if s else "unary" for s in (handler.request_streaming, handler.response_streaming))
    build: Callable[..., Handler] = getattr(grpc, f"{kind}_rpc_method_handler")
    return build(
        wrap(getattr(handler, kind)), request_deserializer=read, response_serializer=handler.response_serializer
    )


def preceded(handler: "grpc.RpcMethodHandler[Any, Any]", check: Callable[[Context], None]) -> Handler:
    """A handler of the same kind that begins with `check`, which may raise."""

    def wrap(behaviour: Behaviour) -> Behaviour:
        async def call(request: Any, context: Context) -> Any:
            check(context)
            return await behaviour(request, context)

        async def pump(request: Any, context: Context) -> Any:
            check(context)
            async for answer in behaviour(request, context):
                yield answer

        return pump if handler.response_streaming and inspect.isasyncgenfunction(behaviour) else call

    return rewrapped(handler, wrap, handler.request_deserializer)


def _tolerant(deserialize: Callable[[bytes], Any] | None) -> Callable[[bytes], Any] | None:
    """Lets the handler's wrapper refuse a request that cannot be read; else the call ends as UNKNOWN before it runs."""
    if deserialize is None:
        return None
    read = deserialize

    def tolerant(data: bytes) -> Any:
        try:
            return read(data)
        except DecodeError:
            return _Malformed()

    return tolerant
