"""The worker API on gRPC: a session for each gateway; links go to the hand-over's server."""

import asyncio
from collections.abc import AsyncIterator
from typing import Protocol, TypeAlias

import grpc.aio

from ...errors import InvalidRequest, Mismatch, TwostrokeError, Unavailable
from ...v1 import worker_pb2 as pb
from ...v1 import worker_pb2_grpc
from ..identity import ProcessIdentity, read_identity
from .session import Session
from .sessions import Sessions

HELLO_S = 10.0
FLUSH_S = 2.0  # what waited when a session ended has this long to leave

SessionContext: TypeAlias = grpc.aio.ServicerContext[pb.ToWorker, pb.FromWorker]
LinkContext: TypeAlias = grpc.aio.ServicerContext[pb.FromDecode, pb.FromPrefill]


class LinkService(Protocol):
    """A prefill worker's end of its links."""

    async def serve(self, requests: AsyncIterator[pb.FromDecode], context: LinkContext) -> None:
        """Runs one link until it ends."""
        ...


class WorkerServicer(worker_pb2_grpc.WorkerServicer):
    """Refuses sessions and links (UNAVAILABLE) until `open` is called. Needs an `ErrorInterceptor` on its server."""

    def __init__(self) -> None:
        self._hello: pb.WorkerHello | None = None
        self._sessions: Sessions | None = None
        self._links: LinkService | None = None

    def open(self, hello: pb.WorkerHello, sessions: Sessions, links: LinkService | None) -> None:
        """The worker is ready. `hello`: its first message to each gateway. `links`: None for roles without."""
        self._hello, self._sessions, self._links = hello, sessions, links

    async def Session(  # type: ignore[override]  # noqa: N802 - a coroutine that writes, where stubs want a generator
        self, request_iterator: AsyncIterator[pb.ToWorker], context: SessionContext
    ) -> None:
        """One gateway's session, from hello to end."""
        if self._sessions is None or self._hello is None:
            raise Unavailable("the worker is not ready: it loads the model", retry_after_s=1.0)
        gateway = check_hello(await _first(request_iterator), self._hello.format.model)
        session = self._sessions.open(gateway)
        self._hello.draining = self._sessions.draining
        session.outbox.put(pb.FromWorker(hello=self._hello))
        session.tell_status(self._sessions.status())  # from here on the gateway counts what is computed in what time
        reader = asyncio.create_task(_read(request_iterator, session))
        writer = asyncio.create_task(_write(context, session))
        try:
            reason = await asyncio.shield(session.ended)
            await asyncio.wait((writer,), timeout=FLUSH_S)
        finally:
            session.end(None)  # the call was cancelled: the gateway is gone
            reader.cancel()
            writer.cancel()
            await asyncio.gather(reader, writer, return_exceptions=True)
        if reason is not None:
            raise reason

    async def Link(  # type: ignore[override]  # noqa: N802
        self, request_iterator: AsyncIterator[pb.FromDecode], context: LinkContext
    ) -> None:
        """One decode worker's link."""
        if self._sessions is None:
            raise Unavailable("the worker is not ready: it loads the model", retry_after_s=1.0)
        if self._links is None:
            raise Mismatch("this worker is no prefill worker: it takes no links")
        await self._links.serve(request_iterator, context)


def check_hello(message: pb.ToWorker, model: str) -> ProcessIdentity:
    """The gateway, if it fits: InvalidRequest where it does not begin with a hello, Mismatch names both values."""
    if message.WhichOneof("kind") != "hello":
        raise InvalidRequest("the first message of a session is hello")
    gateway = read_identity(message.hello.identity)
    if message.hello.model not in ("", model):
        raise Mismatch(f"this worker serves the model {model!r}, the gateway {message.hello.model[:200]!r}")
    return gateway


async def _first(requests: AsyncIterator[pb.ToWorker]) -> pb.ToWorker:
    try:
        async with asyncio.timeout(HELLO_S):
            return await anext(requests)
    except StopAsyncIteration:
        raise InvalidRequest("the session ended before its hello") from None
    except TimeoutError:
        raise Unavailable(f"no hello within {HELLO_S:g} s") from None


async def _read(requests: AsyncIterator[pb.ToWorker], session: Session) -> None:
    """Ends the session with the stream, however that ends."""
    reason: TwostrokeError | None = None
    try:
        async for message in requests:
            session.receive(message)
            if session.ended.done():
                return
    except TwostrokeError as error:  # not a valid message
        reason = error
    finally:
        session.end(reason)


async def _write(context: SessionContext, session: Session) -> None:
    """Moves what waits to the stream; ends the session when that fails."""
    try:
        while (taken := await session.outbox.take()) is not None:
            message, size = taken
            await context.write(message)
            session.outbox.written(size)
    finally:
        session.end(None)
