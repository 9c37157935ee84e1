"""One link of a decode worker: to one incarnation of a prefill worker."""

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

import grpc.aio

from ...errors import Mismatch, TwostrokeError, Unavailable
from ...kvtransfer.messages import FromReader, FromWriter
from ...v1 import worker_pb2 as pb
from ...v1 import worker_pb2_grpc
from ..grpc_calls import end
from ..identity import ProcessIdentity, read_identity
from .handover import PeerAddress
from .link_queue import LinkQueue
from .liveness import Liveness, PeerWatch
from .wire_link import check_format, check_incarnation, from_reader, read_from_writer

log = logging.getLogger(__name__)

_FIRST_BACKOFF_S = 0.05
_LAST_BACKOFF_S = 1.0

Call: TypeAlias = grpc.aio.StreamStreamCall[pb.FromDecode, pb.FromPrefill]
OpenChannel: TypeAlias = Callable[[str], grpc.aio.Channel]


class LinkOwner(Protocol):
    """What a link needs of `LinkClient`, and tells it."""

    form: pb.ModelFormat
    liveness: Liveness
    channel: OpenChannel

    def hello(self, peer: PeerAddress) -> pb.DecodeHello:
        """Our first message to `peer`."""
        ...

    def queue(self) -> LinkQueue[FromReader]:
        """A queue for a new stream."""
        ...

    async def export(self, link: "WriterLink", transport: str) -> pb.TransportOffer:
        """Our pool, opened to that writer anew. Raises Mismatch for a transport of which none is made."""
        ...

    def up(self, link: "WriterLink") -> None:
        """Its stream stands."""
        ...

    def down(self, link: "WriterLink") -> None:
        """Its stream broke."""
        ...

    def received(self, link: "WriterLink", message: FromWriter) -> None:
        """A message came on it."""
        ...

    def dead(self, link: "WriterLink") -> None:
        """The peer's end is proven."""
        ...

    def finished(self, link: "WriterLink", reason: str, final: bool) -> None:
        """It ends; `final`: trying again would be in vain."""
        ...


class WriterLink:
    """The link to one incarnation of a prefill worker: connects, connects again, until that is over."""

    def __init__(self, owner: LinkOwner, peer: PeerAddress) -> None:
        self.peer = peer
        self.queue: LinkQueue[FromReader] | None = None  # of the stream that stands
        self.watch: PeerWatch | None = None  # from the first time that it stood
        self.known: ProcessIdentity | None = None
        self.dying = False  # its end is proven, its stream not yet read to the end
        self.task = asyncio.create_task(self._run())
        self._owner = owner
        self._stood = False  # since the last pause
        self._over = asyncio.Event()  # the peer is dead, or we stop

    def end(self) -> None:
        """Ends the stream and `task` soon."""
        self._over.set()
        if self.queue is not None:
            self.queue.end()

    async def _run(self) -> None:
        owner = self._owner
        reason, final = "", False
        async with owner.channel(self.peer.address) as channel:
            backoff = _FIRST_BACKOFF_S
            until = owner.liveness.now() + owner.liveness.silence_s
            while not self._over.is_set():
                try:
                    await self._stream(worker_pb2_grpc.WorkerStub(channel))
                except Mismatch as error:
                    reason, final = error.message, True
                except (TwostrokeError, TimeoutError, OSError, asyncio.InvalidStateError) as error:
                    reason = str(error) or type(error).__name__
                except asyncio.CancelledError:
                    if (task := asyncio.current_task()) is None or task.cancelling():
                        raise
                    reason = "the stream was cancelled at the other end"  # grpc.aio's way to say so
                except grpc.aio.AioRpcError as error:
                    reason, final = error.details() or "", error.code() is grpc.StatusCode.FAILED_PRECONDITION
                if final or (self.watch is None and owner.liveness.now() >= until):
                    break
                backoff = _FIRST_BACKOFF_S if self._stood else min(2 * backoff, _LAST_BACKOFF_S)
                self._stood = False
                await self._pause(backoff)
        owner.finished(self, reason, final)

    async def _pause(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._over.wait()
        except TimeoutError:
            pass

    async def _stream(self, stub: worker_pb2_grpc.WorkerStub) -> None:
        """One stream from hello to its end."""
        owner = self._owner
        call: Call = stub.Link()
        try:
            handle = None
            async with asyncio.timeout(owner.liveness.silence_s):
                await call.write(pb.FromDecode(hello=owner.hello(self.peer)))
                hello = (await _read(call, "hello")).hello
                identity = self._check(hello)
                if self.watch is None:
                    handle = owner.liveness.open(identity)
                try:
                    if hello.wants_export:
                        await call.write(pb.FromDecode(export=await owner.export(self, hello.transport)))
                    await call.write(_heartbeat(0))
                    await _read(call, "heartbeat")  # said after the handle was opened: it is that peer's
                except BaseException:
                    if handle is not None:
                        handle.close()
                    raise
            if self.watch is None:
                self.known = identity
                self.watch = owner.liveness.watch(
                    identity, handle, on_dead=lambda: owner.dead(self), on_silent=self.drop
                )
            await self._stand(call, self.watch)
        finally:
            end(call)

    def _check(self, hello: pb.PrefillHello) -> ProcessIdentity:
        identity = read_identity(hello.identity)
        check_incarnation(identity.incarnation, self.peer.incarnation)
        check_format(self._owner.form, hello.format)
        if self.known is not None and self.known != identity:
            raise Mismatch("this incarnation introduced itself differently before")
        return identity

    async def _stand(self, call: Call, watch: PeerWatch) -> None:
        owner, writer = self._owner, self.peer.incarnation
        if self._over.is_set():
            return
        queue = self.queue = owner.queue()
        self._stood = True
        watch.heard()
        owner.up(self)
        try:
            await queue.run(
                self._receive(call, watch),
                queue.pump(call.write, lambda message: from_reader(message, owner.form), _heartbeat),
            )
        except Mismatch:
            log.exception("link with writer %016x", writer)
            raise Unavailable("the prefill worker sent what cannot be") from None
        finally:
            self.queue = None
            owner.down(self)

    async def _receive(self, call: Call, watch: PeerWatch) -> None:
        while (raw := await call.read()) is not grpc.aio.EOF:
            watch.heard()
            message = read_from_writer(raw)  # type: ignore[arg-type]
            if message is not None:
                self._owner.received(self, message)

    def drop(self) -> None:
        """Breaks the stream; it comes again."""
        if self.queue is not None:
            self.queue.end()


def _heartbeat(sequence: int) -> pb.FromDecode:
    return pb.FromDecode(heartbeat=pb.Heartbeat(sequence=sequence))


async def _read(call: Any, kind: str) -> pb.FromPrefill:
    """The next message, which must be of this kind."""
    message: Any = await call.read()
    if message is grpc.aio.EOF:
        raise Unavailable(f"the link ended before its {kind}")
    if not isinstance(message, pb.FromPrefill) or message.WhichOneof("kind") != kind:
        raise Mismatch(f"expected {kind}")
    return message
