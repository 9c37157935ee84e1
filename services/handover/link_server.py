"""The prefill worker's end of its links: one stream for each decode worker that wants its KV."""

import asyncio
import contextlib
import logging
from collections import OrderedDict
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass

from ...errors import Mismatch, Unavailable
from ...kvtransfer.messages import FromWriter
from ...kvtransfer.process import ProcessHandle
from ...v1 import worker_pb2 as pb
from ..identity import ProcessIdentity, read_identity
from .lane import Lanes
from .link_events import ReaderEvents
from .link_queue import HEARTBEAT_S, LIMIT, LinkQueue
from .liveness import Liveness, PeerWatch
from .pool_handshake import LinkContext, PoolHandshake, expect
from .pool_opener import Broken, Opened, PoolOpener
from .wire_link import (
    EXPORTED,
    PoolOffer,
    check_format,
    check_incarnation,
    from_writer,
    read_from_reader,
    read_offer,
)

log = logging.getLogger(__name__)

_REMEMBERED = 4096  # incarnations known to be dead


@dataclass(slots=True, eq=False)
class _Reader:
    """A decode worker, from its first handshake to its death."""

    identity: ProcessIdentity
    offer: PoolOffer
    opened: Opened
    watch: PeerWatch
    queue: LinkQueue[FromWriter] | None = None  # of the stream that stands
    broken: bool = False  # its transport's connection is lost


class LinkServer:
    """Serves `Worker.Link`. Built and used on the event loop, `send` apart.

    For the worker: `LinkServer(identity, form, liveness, opener, page_bytes=...)` goes into `PrefillHandover`;
    the gRPC servicer's `Link` awaits `serve`; at the end `driver.stop()`, `stop()`, then the
    server's own stop and `PrefillHandover.close()`.
    """

    def __init__(
        self,
        identity: ProcessIdentity,
        form: pb.ModelFormat,
        liveness: Liveness,
        opener: PoolOpener,
        *,
        page_bytes: int,
        heartbeat_s: float = HEARTBEAT_S,
        queue_limit: int = LIMIT,
    ) -> None:
        """`page_bytes`: of one page of one layer. `queue_limit`: messages that may wait for a decode worker."""
        self._identity = identity
        self._form = form
        self._liveness = liveness
        self._handshake = PoolHandshake(identity, form, opener, liveness.silence_s)
        self._page_bytes = page_bytes
        self._heartbeat_s = heartbeat_s
        self._queue_limit = queue_limit
        self._loop = asyncio.get_running_loop()
        self._events: ReaderEvents | None = None
        self._readers: dict[int, _Reader] = {}
        self._lanes = Lanes(identity)
        self._dead: OrderedDict[int, None] = OrderedDict()
        self._refusals: OrderedDict[str, None] = OrderedDict()

    def attach(self, events: ReaderEvents) -> None:
        """From now on links are accepted."""
        self._events = events

    def send(self, batches: Mapping[int, Sequence[FromWriter]]) -> None:
        """Any thread: messages for readers; dropped where no link stands."""
        if left := self._lanes.send(batches):
            self._loop.call_soon_threadsafe(self._put, left)

    def stop(self) -> None:
        """Ends all links; accepts none. Nothing is told to the events any more."""
        self._events = None
        for reader in self._readers.values():
            reader.watch.close()
            if reader.queue is not None:
                reader.queue.end()
        self._readers.clear()
        self._lanes.close_all()

    def drop(self, reader: int) -> None:
        """Breaks the link with a reader; it will come again."""
        record = self._readers.get(reader)
        if record is not None and record.queue is not None:
            record.queue.end()

    async def serve(self, requests: AsyncIterator[pb.FromDecode], context: LinkContext) -> None:
        """One link, from hello to its end. Raises Mismatch, Unavailable."""
        silence_s = self._liveness.silence_s
        hello = (await expect(requests, "hello", silence_s)).hello
        try:
            identity, offer = self._check(hello)
        except Mismatch as error:
            self._refused(hello.identity.name, error)
            raise
        async with contextlib.AsyncExitStack() as stack:
            handle = opened = None
            reader = self._readers.get(identity.incarnation)
            if reader is None:
                handle = self._liveness.open(identity)
                if handle is not None:
                    stack.callback(handle.close)
            if reader is None or reader.broken:
                broken = self._when_broken(identity.incarnation)
                opened = await self._handshake.reach(identity.incarnation, offer, broken, requests, context)
                stack.callback(opened.transport.close)
            else:
                await self._handshake.hello(context, reader.opened.transport.kind)
            await expect(requests, "heartbeat", silence_s)  # said after the handle was opened: it is that peer's
            if opened is not None:
                reader = self._admit(identity, offer, handle, opened, stack)
            if reader is None:
                raise Unavailable("the peer was lost meanwhile")
        await self._run(reader, hello.lane, requests, context)

    def _check(self, hello: pb.DecodeHello) -> tuple[ProcessIdentity, PoolOffer]:
        if self._events is None:
            raise Unavailable("not ready for links")
        identity = read_identity(hello.identity)
        check_incarnation(self._identity.incarnation, hello.expected_incarnation)
        check_format(self._form, hello.format)
        offer = read_offer(hello.pool)
        if offer.page_bytes != self._page_bytes:
            raise Mismatch(f"page_bytes: {self._page_bytes} here, {offer.page_bytes} there")
        if identity.incarnation in self._dead:
            raise Mismatch(f"incarnation {identity.incarnation:016x} is known to have ended")
        known = self._readers.get(identity.incarnation)
        if known is not None and (known.identity, known.offer) != (identity, offer):
            raise Mismatch("this incarnation introduced itself differently before")
        return identity, offer

    def _refused(self, name: str, error: Mismatch) -> None:
        """Logs a refusal once; the peer comes again and again."""
        text = f"{name}: {error.message}"
        if text not in self._refusals:
            log.warning("refused a link with %s", text)
        _remember(self._refusals, text)

    def _when_broken(self, incarnation: int) -> Broken:
        """Any thread."""

        def broken() -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended, as we do
                self._loop.call_soon_threadsafe(self._broke, incarnation)

        return broken

    def _broke(self, incarnation: int) -> None:
        """Its connection is lost while we know nothing of its death: the stream comes anew, and asks for an export."""
        reader = self._readers.get(incarnation)
        if reader is not None:
            log.warning("the connection with the pool of %s is lost", reader.identity.name)
            reader.broken = True
            self.drop(incarnation)

    def _admit(
        self,
        identity: ProcessIdentity,
        offer: PoolOffer,
        handle: ProcessHandle | None,
        opened: Opened,
        stack: contextlib.AsyncExitStack,
    ) -> _Reader | None:
        """The reader that this stream is for, which takes over what the stream opened unless it has it already. None
        where it was lost meanwhile.
        """
        incarnation = identity.incarnation
        if self._events is None or incarnation in self._dead:
            return None
        reader = self._readers.get(incarnation)
        if reader is not None and not reader.broken and opened.transport.kind not in EXPORTED:
            return reader  # another stream was faster
        stack.pop_all()
        if reader is not None:
            if handle is not None:
                handle.close()
            reader.opened, reader.broken = opened, False
            return reader
        watch = self._liveness.watch(
            identity,
            handle,
            on_dead=lambda: self._ended(incarnation),
            on_silent=lambda: self.drop(incarnation),
        )
        reader = self._readers[incarnation] = _Reader(identity, offer, opened, watch)
        return reader

    async def _run(
        self, reader: _Reader, lane: pb.Lane, requests: AsyncIterator[pb.FromDecode], context: LinkContext
    ) -> None:
        if reader.queue is not None:  # an older stream that is not yet known to be broken
            reader.queue.end()
            self._down(reader, reader.queue)
        queue = reader.queue = LinkQueue[FromWriter](limit=self._queue_limit, heartbeat_s=self._heartbeat_s)
        reader.watch.heard()
        if self._events is not None:
            self._events.reader_up(reader.identity.incarnation, reader.offer, reader.opened)
        log.info("link with %s stands", reader.identity.name)
        try:
            await queue.run(
                self._receive(reader, lane, queue, requests),
                queue.pump(context.write, from_writer, _heartbeat),
            )
        except Mismatch as error:
            log.error("link with %s: %s", reader.identity.name, error.message)
            raise
        finally:
            self._down(reader, queue)

    async def _receive(
        self, reader: _Reader, lane: pb.Lane, queue: LinkQueue[FromWriter], requests: AsyncIterator[pb.FromDecode]
    ) -> None:
        """Until the stream ends; raises Mismatch for what no honest peer sends. The lane is opened with the first
        message, by which the link stands at the other end too: what came before that could not be answered.
        """
        stands = False
        async for raw in requests:
            reader.watch.heard()
            message = read_from_reader(raw, self._form, reader.offer)
            if reader.queue is not queue or self._events is None:
                return
            if not stands:
                stands = True
                self._lanes.open(reader.identity, lane)
            if message is not None:
                self._events.received(reader.identity.incarnation, message)

    def _down(self, reader: _Reader, queue: LinkQueue[FromWriter]) -> None:
        if reader.queue is not queue:
            return
        reader.queue = None
        self._lanes.close(reader.identity.incarnation)
        if self._events is not None and reader.identity.incarnation in self._readers:
            log.info("link with %s broke", reader.identity.name)
            self._events.reader_down(reader.identity.incarnation)

    def _ended(self, incarnation: int) -> None:
        reader = self._readers.pop(incarnation)
        _remember(self._dead, incarnation)
        if reader.queue is not None:
            reader.queue.end()
        if self._events is not None:
            self._events.reader_dead(incarnation)

    def _put(self, batches: Mapping[int, Sequence[FromWriter]]) -> None:
        for incarnation, messages in batches.items():
            reader = self._readers.get(incarnation)
            if reader is not None and reader.queue is not None:
                reader.queue.put(messages)


def _heartbeat(sequence: int) -> pb.FromPrefill:
    return pb.FromPrefill(heartbeat=pb.Heartbeat(sequence=sequence))


def _remember(known: OrderedDict[int, None] | OrderedDict[str, None], entry: int | str) -> None:
    known[entry] = None  # type: ignore[index]
    if len(known) > _REMEMBERED:
        known.popitem(last=False)
