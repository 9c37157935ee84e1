"""Requests of clients as they come in: read within a time, and refused where they cannot be read."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeAlias

import grpc.aio
from google.protobuf.message import DecodeError

from ..errors import DeadlineExceeded, InvalidRequest
from .field_count import FieldCount

Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]
Read: TypeAlias = Callable[[bytes], Any]
Room: TypeAlias = Callable[[Context], AbstractAsyncContextManager[None]]
"""Holds a place while the next request of a call is on its way. Overloaded."""
Counted: TypeAlias = Callable[[Context], AbstractContextManager[None]]
"""Counts a call while it is open. Overloaded."""
_MALFORMED = "the request is not a valid message (a text field may hold malformed UTF-8)"


def _room(_: Context) -> AbstractAsyncContextManager[None]:
    return nullcontext()


def _uncounted(_: Context) -> AbstractContextManager[None]:
    return nullcontext()


class _Refused:
    """Stands for a request that cannot be read, until the handler's turn to refuse it."""

    def __init__(self, why: str) -> None:
        self.why = why


@dataclass(frozen=True, slots=True)
class Arrival:
    """What requests may be like, and how long they may take to come; 0 seconds: for ever. `request_s`: until a call has
    its only request. `idle_s`: until one of several follows, where the handler awaits nothing else. `room`: for each.
    `counted`: each call."""

    fields: FieldCount | None = None
    request_s: float = 0
    idle_s: float = 0
    room: Room = _room
    counted: Counted = _uncounted


async def each(requests: AsyncIterator[Any], context: Context, idle_s: float, room: Room = _room) -> AsyncIterator[Any]:
    """Refuses what cannot be read, and waits for each no longer than `idle_s` (0: for ever). DeadlineExceeded;
    Overloaded where it has to give way."""
    if not idle_s and room is _room:  # between peers that trust each other
        async for request in requests:
            check(request)
            yield request
        return
    rest: AsyncIterator[Any] | None = None
    while True:
        scope = asyncio.timeout(idle_s or None)
        try:
            async with scope, room(context):
                rest = rest or aiter(requests)  # gRPC's complains where it is begun, and never read
                request = await anext(rest)
        except StopAsyncIteration:
            return
        except TimeoutError:
            if not scope.expired():
                raise
            raise DeadlineExceeded(f"no request came for {idle_s:g} s") from None
        check(request)
        yield request


async def only(context: Context, request_s: float, room: Room = _room) -> Any:
    """The request of a call that has one. DeadlineExceeded where it does not arrive: a part of one may have;
    Overloaded where it has to give way."""
    scope = asyncio.timeout(request_s)
    try:
        async with scope, room(context):
            request = await context.read()
    except TimeoutError:
        if not scope.expired():
            raise
        raise DeadlineExceeded(f"the request did not arrive within {request_s:g} s") from None
    if request is grpc.aio.EOF:
        raise InvalidRequest("the request is missing")
    return request


def check(request: Any) -> None:
    """InvalidRequest for one that could not be read."""
    if isinstance(request, _Refused):
        raise InvalidRequest(request.why)


def tolerant(read: Read, fields: FieldCount | None) -> Read:
    """Lets the handler's wrapper refuse a request that cannot be read; else the call ends as UNKNOWN before it runs."""
    kind = read(b"").DESCRIPTOR

    def tolerant(data: bytes) -> Any:
        if fields is not None and fields.exceeded(kind, data):
            return _Refused(f"the request has more than {fields.most} fields: send less at once, and numbers packed")
        try:
            return read(data)
        except DecodeError:
            return _Refused(_MALFORMED)

    return tolerant
