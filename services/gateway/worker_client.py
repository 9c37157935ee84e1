"""Keeps a session with one worker: connects, shakes hands, moves messages, notices silence, connects again."""

import asyncio
import logging
import random
import time
from collections.abc import Callable, Coroutine
from typing import Any, Protocol, TypeAlias

import grpc.aio

from ...errors import Mismatch, TwostrokeError, Unavailable
from ...v1 import worker_pb2 as pb
from ...v1 import worker_pb2_grpc
from ..grpc_calls import end, write_failed
from ..grpc_setup import OpenChannel, connection_fault, open_channel
from ..identity import ProcessIdentity, read_identity
from .router import Role
from .worker_session import WorkerSession

HEARTBEAT_S = 1.0
FIRST_BACKOFF_S = 0.1
LAST_BACKOFF_S = 1.5
PATIENCE_S = 60.0  # a worker that was never met and stays away for so long is no longer merely starting
MAX_REASON = 300  # characters
NO_CONNECTION = "failed to connect to all addresses"  # so gRPC begins, and names the address again and again

Call: TypeAlias = grpc.aio.StreamStreamCall[pb.ToWorker, pb.FromWorker]

logger = logging.getLogger(__name__)


class Host(Protocol):
    """What a client needs of the fleet that it belongs to."""

    def check(self, session: WorkerSession) -> None:
        """Mismatch where this worker does not fit to the others."""

    def joined(self, session: WorkerSession) -> None:
        """The session can be used."""

    def left(self, session: WorkerSession) -> None:
        """The session ended."""

    def changed(self) -> None:
        """A worker began to drain."""


class WorkerClient:
    """One configured address. `session` is there while the worker is connected and fits, else `reason` says why not."""

    def __init__(
        self,
        address: str,
        gateway: ProcessIdentity,
        model: str,
        host: Host,
        *,
        silence_s: float,
        channel: OpenChannel = open_channel,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`silence_s`: a worker that says nothing for so long is taken for dead. `channel`: opens one to an address."""
        self.address = address
        self.session: WorkerSession | None = None
        self.reason = "not connected yet"
        self.name = ""  # of the last session, like `role`
        self.role: Role | None = None
        self.leaving = False  # it is no longer named: the next session's end is the last
        self.task: asyncio.Task[None] | None = None  # runs `run`; the fleet's
        self._gateway = gateway
        self._model = model
        self._host = host
        self._silence_s = silence_s
        self._channel = channel
        self._clock = clock
        self._starting_until: float | None = clock() + PATIENCE_S  # None: it was met, or waited for long enough

    async def run(self) -> None:
        """Until cancelled, or nobody wants it any more. A session that worked resets the backoff."""
        backoff = FIRST_BACKOFF_S
        while not self.leaving:
            worked = await self._once()
            if self.leaving:
                return
            backoff = FIRST_BACKOFF_S if worked else min(LAST_BACKOFF_S, 2 * backoff)
            await asyncio.sleep(backoff * random.uniform(0.7, 1.3))

    def leave(self) -> None:
        """It is no longer named: ends now, or with its session."""
        self.leaving = True
        if self.session is None and self.task is not None:
            self.task.cancel()

    async def _once(self) -> bool:
        """One session from connecting to its end; whether it came to work."""
        worked = False
        async with self._channel(self.address) as channel:
            call: Call = worker_pb2_grpc.WorkerStub(channel).Session()
            try:
                session = await self._shake_hands(call)
                worked = True
                self._note(await self._serve(call, session))
            except TwostrokeError as error:
                self._note(error.message)
            except grpc.aio.AioRpcError as error:
                self._note(told(error), absent=error.code() is grpc.StatusCode.UNAVAILABLE)
            except TimeoutError:
                self._note(f"no handshake within {self._silence_s:g} s")
            except asyncio.InvalidStateError:
                self._note("the call ended before the handshake")
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if task is None or task.cancelling():
                    raise
                self._note("the worker cancelled the call")  # grpc raises its status so
            finally:
                end(call)
        return worked

    def _note(self, reason: str, *, absent: bool = False) -> None:
        """Keeps the reason, and logs it when it is a new one: a worker that stays away is told of once.

        `absent`: it is not there, or not ready. Until it was met once, that is its start and nothing to warn of.
        """
        reason = reason[:MAX_REASON]
        starting = absent and self._starting_until is not None
        if starting and self._clock() >= (self._starting_until or 0.0):
            self._starting_until = None
            logger.warning("worker %s: not met in %g s: %s", self.address, PATIENCE_S, reason)
        elif reason != self.reason:
            if starting:
                logger.info("waiting for worker %s: %s", self.address, reason)
            else:
                logger.warning("worker %s: %s", self.address, reason)
        self.reason = reason

    async def _shake_hands(self, call: Call) -> WorkerSession:
        """Mismatch or the worker's own status where one refuses the other; TimeoutError where it says nothing."""
        hello = pb.GatewayHello(identity=self._gateway.message(), model=self._model)
        async with asyncio.timeout(self._silence_s):
            await call.write(pb.ToWorker(hello=hello))
            message = await call.read()
        if not isinstance(message, pb.FromWorker) or message.WhichOneof("kind") != "hello":
            raise Mismatch("refused: it did not begin with a hello")
        read_identity(message.hello.identity)
        session = WorkerSession(message.hello, self._gateway.incarnation)
        self._host.check(session)
        return session

    async def _serve(self, call: Call, session: WorkerSession) -> str:
        """Runs a session until it ends; returns why."""
        self.session = session
        self.name, self.role = session.name, session.load.role
        self._starting_until = None
        logger.info("worker %s: %s (%s) is ready", self.address, session.name, session.load.role.name.lower())
        self.reason = ""
        self._host.joined(session)
        tasks = [
            asyncio.create_task(_ending(session, _read(call, session, self._host))),
            asyncio.create_task(_ending(session, _write(call, session))),
            asyncio.create_task(_ending(session, _beat(session, self._silence_s))),
        ]
        try:
            return f"{session.name}: {await asyncio.shield(session.ended)}"
        finally:
            session.end("the gateway is shutting down")
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self.session = None
            self._host.left(session)


def told(error: grpc.aio.AioRpcError) -> str:
    """A status as a reason for people."""
    text = error.details() or ""
    if error.code() is grpc.StatusCode.FAILED_PRECONDITION:
        return f"refused: {text}"
    if error.code() is grpc.StatusCode.UNAVAILABLE and text.startswith(NO_CONNECTION):
        return connection_fault(text)
    if write_failed(text):
        return "the connection broke"
    return f"{error.code().name}: {text}"


async def _ending(session: WorkerSession, work: Coroutine[Any, Any, None]) -> None:
    """Runs one of a session's three tasks; however it ends, the session ends with it."""
    reason = "the worker ended the session"
    try:
        await work
    except TwostrokeError as error:
        reason = error.message
    except grpc.aio.AioRpcError as error:
        reason = told(error)
    except asyncio.CancelledError:  # of the call: grpc raises it in reads and writes that wait
        reason = "the session was cancelled"
        raise
    except Exception as error:
        logger.exception("worker %s", session.name)
        reason = f"internal error ({type(error).__name__})"
    finally:
        session.end(reason[:MAX_REASON])


async def _read(call: Call, session: WorkerSession, host: Host) -> None:
    while isinstance(message := await call.read(), pb.FromWorker):
        drained = session.load.draining
        session.receive(message)
        if session.load.draining != drained:
            host.changed()


async def _write(call: Call, session: WorkerSession) -> None:
    while (taken := await session.outbox.take()) is not None:
        message, size = taken
        try:
            await call.write(message)
        except asyncio.InvalidStateError:  # it ended between two turns of the loop, and we run before its reader
            raise Unavailable(f"{(await call.code()).name}: {await call.details()}") from None
        session.outbox.written(size)


async def _beat(session: WorkerSession, silence_s: float, clock: Callable[[], float] = time.monotonic) -> None:
    """Each second: a sign of life, and a look whether the worker gave one."""
    before = clock()
    while True:
        await asyncio.sleep(HEARTBEAT_S)
        now = clock()
        session.heard += max(0.0, now - before - HEARTBEAT_S)  # we were stopped or starved: what came then is unread
        before = now
        if now - session.heard > silence_s:
            session.end(f"silent for {silence_s:g} s")
            return
        session.beat()
