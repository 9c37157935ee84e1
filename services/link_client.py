"""The decode worker's end of its links: one stream to each prefill worker that it works with."""

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import grpc.aio

from ..errors import Mismatch, TwostrokeError, Unavailable
from ..kvtransfer.messages import FromReader, FromWriter
from ..v1 import worker_pb2 as pb
from ..v1 import worker_pb2_grpc
from .grpc_setup import open_channel
from .handover import PeerAddress
from .identity import ProcessIdentity, read_identity
from .link_queue import HEARTBEAT_S, LIMIT, LinkQueue
from .liveness import Liveness, PeerWatch
from .wire_link import PoolOffer, check_format, check_incarnation, from_reader, read_from_writer

log = logging.getLogger(__name__)

_FIRST_BACKOFF_S = 0.05
_LAST_BACKOFF_S = 1.0
_STOP_S = 2.0
_LAST_WORDS_S = 1.0

Call: TypeAlias = grpc.aio.StreamStreamCall[pb.FromDecode, pb.FromPrefill]
OpenChannel: TypeAlias = Callable[[str], grpc.aio.Channel]


class WriterEvents(Protocol):
    """What links tell the decode side. Called on the event loop in order; must not block."""

    def writer_up(self, writer: int) -> None:
        """A link stands."""
        ...

    def writer_down(self, writer: int) -> None:
        """The link broke; nothing is proven."""
        ...

    def writer_dead(self, writer: int) -> None:
        """That process is gone for certain."""
        ...

    def writer_refused(self, writer: int, reason: str, final: bool) -> None:
        """No link came about; nothing was ever sent but hellos. `final`: none ever will."""
        ...

    def writer_replaced(self, writer: int, reason: str) -> None:
        """Another process answers at its address, and no proof of its death can be had."""
        ...

    def received(self, writer: int, message: FromWriter) -> None:
        """A message came."""
        ...


class _Link:
    """The link to one incarnation of a prefill worker: connects, connects again, until that is over."""

    def __init__(self, owner: "LinkClient", peer: PeerAddress) -> None:
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
            until = owner.now() + owner.give_up_s
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
                if final or (self.watch is None and owner.now() >= until):
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
                identity = self._check((await _read(call, "hello")).hello)
                if self.watch is None:
                    handle = owner.liveness.open(identity)
                try:
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
            call.cancel()

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


class LinkClient:
    """All links of a decode worker. Built and used on the event loop, `send` and `want` apart.

    For the worker: `LinkClient(identity, form, liveness, offer)` goes into `DecodeHandover`; call `want` with what the
    gateways' `Peers` name; at the end `driver.stop()`, then `await stop()`, then close the pool and exit soon (a
    prefill worker takes us for frozen when we live on in silence).
    """

    def __init__(
        self,
        identity: ProcessIdentity,
        form: pb.ModelFormat,
        liveness: Liveness,
        offer: PoolOffer,
        *,
        channel: OpenChannel = open_channel,
        heartbeat_s: float = HEARTBEAT_S,
        queue_limit: int = LIMIT,
    ) -> None:
        """`offer`: our own pool. `queue_limit`: messages that may wait for a prefill worker."""
        self.form = form
        self.liveness = liveness
        self.channel = channel
        self.now = liveness.now
        self.give_up_s = liveness.silence_s  # for a peer with which no link ever stood
        self._identity = identity
        self._offer = offer
        self._heartbeat_s = heartbeat_s
        self._queue_limit = queue_limit
        self._loop = asyncio.get_running_loop()
        self._events: WriterEvents | None = None
        self._links: dict[int, _Link] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def attach(self, events: WriterEvents) -> None:
        """Before the first `want`."""
        self._events = events

    def want(self, peers: Iterable[PeerAddress]) -> None:
        """Any thread: links with these shall stand. Idempotent; needed again after `writer_refused`."""
        self._loop.call_soon_threadsafe(self._want, tuple(peers))

    def send(self, batches: Mapping[int, Sequence[FromReader]]) -> None:
        """Any thread: messages for writers; dropped where no link stands."""
        self._loop.call_soon_threadsafe(self._put, batches)

    async def stop(self) -> None:
        """Ends all links. Nothing is told to the events any more."""
        self._events = None
        links = list(self._links.values())
        self._links.clear()
        for link in links:
            link.end()
            if link.watch is not None:
                link.watch.close()
        if self._tasks:
            _, pending = await asyncio.wait(self._tasks, timeout=_STOP_S)
            for task in pending:
                task.cancel()
            await asyncio.gather(*pending, return_exceptions=True)

    def standing(self) -> list[int]:
        """Writers with which a link stands."""
        return [writer for writer, link in self._links.items() if link.queue is not None]

    def drop(self, writer: int) -> None:
        """Breaks the stream with a writer; it comes again."""
        link = self._links.get(writer)
        if link is not None:
            link.drop()

    # For `_Link`

    def hello(self, peer: PeerAddress) -> pb.DecodeHello:
        """Our first message to `peer`."""
        return pb.DecodeHello(
            identity=self._identity.message(),
            format=self.form,
            pool=self._offer.message(),
            expected_incarnation=peer.incarnation,
        )

    def queue(self) -> LinkQueue[FromReader]:
        """A queue for a new stream."""
        return LinkQueue(limit=self._queue_limit, heartbeat_s=self._heartbeat_s)

    def up(self, link: _Link) -> None:
        """Its stream stands."""
        log.info("link with %s stands", link.known.name if link.known else link.peer.address)
        if self._events is not None:
            self._events.writer_up(link.peer.incarnation)

    def down(self, link: _Link) -> None:
        """Its stream broke."""
        log.info("link with %s broke", link.known.name if link.known else link.peer.address)
        if link.dying:
            self._bury(link)
        elif self._events is not None and link.peer.incarnation in self._links:
            self._events.writer_down(link.peer.incarnation)

    def received(self, link: _Link, message: FromWriter) -> None:
        """A message came on it."""
        if self._events is not None and link.peer.incarnation in self._links:
            self._events.received(link.peer.incarnation, message)

    def dead(self, link: _Link) -> None:
        """The peer's end is proven. A `Complete` that it sent before may still wait in the stream."""
        if link.queue is None:
            self._bury(link)
        else:
            link.dying = True
            self._loop.call_later(_LAST_WORDS_S, link.drop)

    def _bury(self, link: _Link) -> None:
        self._links.pop(link.peer.incarnation, None)
        link.end()
        if self._events is not None:
            self._events.writer_dead(link.peer.incarnation)

    def finished(self, link: _Link, reason: str, final: bool) -> None:
        """It gave up, unless its peer died or we stop."""
        if self._events is None or self._links.get(link.peer.incarnation) is not link:
            return
        del self._links[link.peer.incarnation]
        log.warning("no link with %s (%016x): %s", link.peer.address, link.peer.incarnation, reason)
        if link.watch is None:
            self._events.writer_refused(link.peer.incarnation, reason, final)
        else:
            if not link.watch.provable:
                link.watch.close()
            self._events.writer_replaced(link.peer.incarnation, reason)

    # On the loop

    def _want(self, peers: Sequence[PeerAddress]) -> None:
        if self._events is None:
            return
        for peer in peers:
            if peer.incarnation not in self._links:
                link = self._links[peer.incarnation] = _Link(self, peer)
                self._tasks.add(link.task)
                link.task.add_done_callback(self._tasks.discard)

    def _put(self, batches: Mapping[int, Sequence[FromReader]]) -> None:
        for writer, messages in batches.items():
            link = self._links.get(writer)
            if link is not None and link.queue is not None:
                link.queue.put(messages)


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
