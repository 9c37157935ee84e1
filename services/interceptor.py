"""Turns the exception tree into gRPC statuses, for every RPC of a server: the one place where that is done."""

import asyncio
import inspect
import logging
import math
import traceback
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeAlias

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import Message
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
from .incoming import Arrival, Context, Read, check, each, only, tolerant

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

Behaviour: TypeAlias = Callable[[Any, Context], Any]
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any] | None"  # generic in the stubs only

logger = logging.getLogger(__name__)


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


def _wrap(behaviour: Behaviour, method: str, arrival: Arrival, *, streams_in: bool, streams_out: bool) -> Behaviour:
    """The same handler with its errors mapped; the request is checked first. With `request_s` it reads its only request
    by itself.

    A streaming handler may be an async generator, or a coroutine function that calls `context.write`, and knows itself
    how long it waits for requests.
    """
    generates = streams_out and inspect.isasyncgenfunction(behaviour)

    async def given(request: Any, context: Context) -> Any:
        if streams_in:
            return each(request, context, arrival.idle_s if generates else 0, arrival.room)
        if arrival.request_s:
            request = await only(context, arrival.request_s, arrival.room)
        check(request)
        return request

    async def call(request: Any, context: Context) -> Any:
        return await behaviour(await given(request, context), context)

    async def pump(request: Any, context: Context) -> None:
        answers = behaviour(await given(request, context), context)
        try:
            async for answer in answers:
                await context.write(answer)
        finally:
            await answers.aclose()

    inner = pump if generates else call

    async def counted(request: Any, context: Context) -> Any:
        with arrival.counted(context):
            return await inner(request, context)

    async def guarded(request: Any, context: Context) -> Any:
        return await _guarded(counted(request, context), context, method)

    return guarded


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Give it to `create_server`; one for all RPC kinds."""

    def __init__(self, arrival: Arrival | None = None) -> None:
        """`arrival`: what clients' requests may be like; None: peers are trusted."""
        self._arrival = arrival or Arrival()
        self._readers: dict[str, Read | None] = {}  # of methods that there are

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        """Wraps the method's handler; methods of others' making (health, reflection) too."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        method = handler_call_details.method
        wrap = partial(
            _wrap,
            method=method,
            arrival=self._arrival,
            streams_in=bool(handler.request_streaming),
            streams_out=bool(handler.response_streaming),
        )
        return rewrapped(handler, wrap, self._reader(method, handler), reads=self._arrival.request_s > 0)

    def _reader(self, method: str, handler: "grpc.RpcMethodHandler[Any, Any]") -> Read | None:
        """None for handlers that refuse a call before they read, whose methods need not exist."""
        if handler.request_deserializer is None:
            return None
        if method not in self._readers:
            self._readers[method] = tolerant(handler.request_deserializer, self._arrival.fields)
        return self._readers[method]


def rewrapped(
    handler: "grpc.RpcMethodHandler[Any, Any]",
    wrap: Callable[[Behaviour], Behaviour],
    read: Read | None,
    *,
    reads: bool = False,
) -> Handler:
    """A handler of the same kind around `wrap` of the method; `read`: its request's deserializer. `reads`: it takes its
    request from the context; on the wire that is the same."""
    kind = "_".join("stream" if s else "unary" for s in (handler.request_streaming, handler.response_streaming))
    behaviour = wrap(getattr(handler, kind))
    if reads:
        kind = f"stream_{kind.partition('_')[2]}"
    build: Callable[..., Handler] = getattr(grpc, f"{kind}_rpc_method_handler")
    return build(behaviour, request_deserializer=read, response_serializer=handler.response_serializer)


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
