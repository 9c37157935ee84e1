"""The decode worker's end of its links: one stream to each prefill worker that it works with."""

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence

from ...errors import Mismatch
from ...kvtransfer.messages import FromReader, FromWriter
from ...v1 import worker_pb2 as pb
from ..grpc_setup import open_channel
from ..identity import ProcessIdentity
from .handover import PeerAddress
from .lane import LaneEnd
from .link_events import WriterEvents
from .link_queue import HEARTBEAT_S, LIMIT, LinkQueue
from .liveness import Liveness
from .pool_exports import PoolExports
from .wire_link import PoolOffer
from .writer_link import OpenChannel, WriterLink

log = logging.getLogger(__name__)

_STOP_S = 2.0
_LAST_WORDS_S = 1.0


class LinkClient:
    """All links of a decode worker. Built and used on the event loop, `send`, `want` and `lane` apart.

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
        exports: PoolExports | None = None,
        heartbeat_s: float = HEARTBEAT_S,
        queue_limit: int = LIMIT,
    ) -> None:
        """`offer`: our own pool. `exports`: of it, for transports by which each writer has its own. `queue_limit`:
        messages that may wait for a prefill worker.
        """
        self.form = form
        self.liveness = liveness
        self.channel = channel
        self._identity = identity
        self._offer = offer
        self._exports = exports
        self._heartbeat_s = heartbeat_s
        self._queue_limit = queue_limit
        self._loop = asyncio.get_running_loop()
        self._events: WriterEvents | None = None
        self._lane: LaneEnd | None = None
        self._links: dict[int, WriterLink] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def attach(self, events: WriterEvents) -> None:
        """Before the first `want`."""
        self._events = events
        try:
            self._lane = LaneEnd(self._from_lane)
        except OSError as error:
            log.info("all that a hand-over says comes by its link: %s", error)

    def want(self, peers: Iterable[PeerAddress]) -> None:
        """Any thread: links with these shall stand. Idempotent; needed again after `writer_refused`."""
        self._loop.call_soon_threadsafe(self._want, tuple(peers))

    def send(self, batches: Mapping[int, Sequence[FromReader]]) -> None:
        """Any thread: messages for writers; dropped where no link stands."""
        self._loop.call_soon_threadsafe(self._put, batches)

    def lane(self, writer: int) -> LaneEnd | None:
        """Any thread: by which that writer speaks to us, if it does."""
        lane = self._lane
        return lane if lane is not None and lane.heard(writer) else None

    async def stop(self) -> None:
        """Ends all links. Nothing is told to the events any more."""
        self._events = None
        if self._lane is not None:
            self._lane.close()
            self._lane = None
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

    # LinkOwner

    def hello(self, peer: PeerAddress) -> pb.DecodeHello:
        """Our first message to `peer`."""
        return pb.DecodeHello(
            identity=self._identity.message(),
            format=self.form,
            pool=self._offer.message(),
            expected_incarnation=peer.incarnation,
            lane=None if self._lane is None else self._lane.offer(peer.incarnation),
        )

    def queue(self) -> LinkQueue[FromReader]:
        """A queue for a new stream."""
        return LinkQueue(limit=self._queue_limit, heartbeat_s=self._heartbeat_s)

    async def export(self, link: WriterLink, transport: str) -> pb.TransportOffer:
        """Our pool, opened to that writer anew."""
        exports = self._exports
        if exports is None or transport != exports.kind:
            raise Mismatch(f"transport: none that is made for each writer here, {transport} there")
        descriptor = await asyncio.to_thread(exports.renew, link.peer.incarnation)
        return pb.TransportOffer(name=transport, descriptor=descriptor)

    def up(self, link: WriterLink) -> None:
        """Its stream stands."""
        log.info("link with %s stands", link.known.name if link.known else link.peer.address)
        if self._events is not None:
            self._events.writer_up(link.peer.incarnation)

    def down(self, link: WriterLink) -> None:
        """Its stream broke."""
        log.info("link with %s broke", link.known.name if link.known else link.peer.address)
        if link.dying:
            self._bury(link)
        elif self._events is not None and link.peer.incarnation in self._links:
            self._events.writer_down(link.peer.incarnation)

    def received(self, link: WriterLink, message: FromWriter) -> None:
        """A message came on it."""
        if self._events is not None and link.peer.incarnation in self._links:
            self._events.received(link.peer.incarnation, message)

    def _from_lane(self, writer: int, message: FromWriter) -> None:
        """As `received`, on the lane's thread."""
        events = self._events
        if events is not None and writer in self._links:
            events.received(writer, message)

    def dead(self, link: WriterLink) -> None:
        """The peer's end is proven. A `Complete` that it sent before may still wait in the stream."""
        if link.queue is None:
            self._bury(link)
        else:
            link.dying = True
            self._loop.call_later(_LAST_WORDS_S, link.drop)

    def _bury(self, link: WriterLink) -> None:
        self._links.pop(link.peer.incarnation, None)
        self._forget(link)
        link.end()
        self._after_revoking(link, self._dead)

    def _forget(self, link: WriterLink) -> None:
        if self._lane is not None:
            self._lane.forget(link.peer.incarnation)

    def _after_revoking(self, link: WriterLink, tell: Callable[[int], None]) -> None:
        """Tells it once nothing of that writer's reaches our pool any more, not even what is still in a socket."""
        writer = link.peer.incarnation
        if self._exports is None or not self._exports.has(writer):
            tell(writer)
            return
        task = asyncio.create_task(self._revoke(self._exports, writer, tell))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _revoke(self, exports: PoolExports, writer: int, tell: Callable[[int], None]) -> None:
        try:
            await asyncio.to_thread(exports.revoke, writer)
        except Exception:
            log.exception("access of %016x cannot be ended: pages that it may write stay held", writer)
            return
        tell(writer)

    def _dead(self, writer: int) -> None:
        if self._events is not None:
            self._events.writer_dead(writer)

    def finished(self, link: WriterLink, reason: str, final: bool) -> None:
        """It gave up, unless its peer died or we stop."""
        if self._events is None or self._links.get(link.peer.incarnation) is not link:
            return
        del self._links[link.peer.incarnation]
        self._forget(link)
        log.warning("no link with %s (%016x): %s", link.peer.address, link.peer.incarnation, reason)
        if link.watch is None:
            self._events.writer_refused(link.peer.incarnation, reason, final)
            return
        if not link.watch.provable:
            link.watch.close()
        self._events.writer_replaced(link.peer.incarnation, reason)
        if self._fenced_by_revoking(link):
            self._after_revoking(link, self._dead)

    def _fenced_by_revoking(self, link: WriterLink) -> bool:
        """Whether that writer can do nothing without an export: a process of this host might still copy by itself."""
        elsewhere = link.known is not None and link.known.host != self._identity.host
        return elsewhere and self._exports is not None and self._exports.has(link.peer.incarnation)

    # On the loop

    def _want(self, peers: Sequence[PeerAddress]) -> None:
        if self._events is None:
            return
        for peer in peers:
            if peer.incarnation not in self._links:
                link = self._links[peer.incarnation] = WriterLink(self, peer)
                self._tasks.add(link.task)
                link.task.add_done_callback(self._tasks.discard)

    def _put(self, batches: Mapping[int, Sequence[FromReader]]) -> None:
        for writer, messages in batches.items():
            link = self._links.get(writer)
            if link is not None and link.queue is not None:
                link.queue.put(messages)
