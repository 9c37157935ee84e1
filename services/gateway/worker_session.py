"""The gateway's side of a session with a worker: what runs there for us, and what goes over. Knows no gRPC.

All of it belongs to the event loop.
"""

import asyncio
import time
from collections.abc import Iterable

from ...engine.prefix_cache import cache_root
from ...engine.request import SequenceKey
from ...errors import Mismatch, Unavailable
from ...v1 import worker_pb2 as pb
from ..worker.outbox import Outbox
from .cached_blocks import CachedBlocks
from .inbox import Event, Failed, Gone, Inbox, Output
from .placement import kv_token_bytes, pair_rates
from .prefixes import CachedPages
from .router import Role, WorkerLoad
from .wire_gateway import make_cancel, unpack_step

RETRY_S = 1.0
MAX_PARTS = 32  # of what a worker tells about its start and its memory
MAX_PAIRS = 1024  # decode workers of which a prefill worker tells how fast KV goes there
OUTBOX_BYTES = 64 << 20  # submissions that wait for a worker that does not read


class WorkerSession:
    """Lives from the handshake until `end`, which tells every request that waits for this worker."""

    def __init__(self, hello: pb.WorkerHello, gateway: int) -> None:
        """`gateway`: our incarnation. Mismatch where the hello names no role or no pages."""
        if int(hello.role) not in tuple(Role):
            raise Mismatch(f"{hello.identity.name} names role {hello.role}, which is unknown here")
        if not (hello.pages and hello.format.page_size and hello.max_tokens):
            raise Mismatch(f"{hello.identity.name} has no pages")
        self.name = hello.identity.name
        self.incarnation = hello.identity.incarnation
        self.format = hello.format
        self.start_seconds = dict(list(hello.start_seconds.items())[:MAX_PARTS])
        self.memory_bytes = dict(list(hello.memory_bytes.items())[:MAX_PARTS])
        self.peer = pb.Peer(address=hello.address, incarnation=self.incarnation)
        self.load = WorkerLoad(
            name=self.name,
            incarnation=self.incarnation,
            role=Role(hello.role),
            pages=hello.pages,
            page_size=hello.format.page_size,
            max_batch=max(1, hello.max_batch),
            max_tokens=hello.max_tokens,
            free_pages=hello.pages,
            draining=hello.draining,
            layers=hello.format.layers,
            kv_token_bytes=kv_token_bytes(hello.format),
            chunk_tokens=hello.chunk_tokens,
        )
        self.outbox: Outbox[pb.ToWorker] = Outbox(OUTBOX_BYTES)
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.heard = time.monotonic()
        self.status = pb.Status(free_pages=hello.pages, pages=hello.pages)  # the last one
        self.cached = CachedPages(hello.pages)
        self.blocks: CachedBlocks | None = None  # are told what its cache holds, if anybody follows that
        self.cache_root = cache_root(hello.format.fingerprint, hello.format.kv_dtype, hello.format.page_size)
        self._gateway = gateway
        self._inboxes: dict[SequenceKey, Inbox] = {}
        self._beats = 0
        self._prefilled: tuple[int, int] | None = None  # tokens and microseconds, by the last status

    @property
    def waiting(self) -> int:
        """Sequences whose answers are still wanted."""
        return len(self._inboxes)

    def submit(self, key: SequenceKey, message: pb.Submit, inbox: Inbox) -> None:
        """Sends a sequence; what comes of it goes to `inbox`. Unavailable where the session ended."""
        self._inboxes[key] = inbox
        self._send(pb.ToWorker(submit=message))
        if self.ended.done():
            self._inboxes.pop(key, None)
            raise Unavailable(f"{self.name}: {self.ended.result()}", retry_after_s=RETRY_S)

    def expect(self, key: SequenceKey, inbox: Inbox) -> None:
        """What comes of a further sample of a sequence that was submitted just now goes to `inbox`."""
        self._inboxes[key] = inbox

    def cancel(self, key: SequenceKey) -> None:
        """Drops a sequence here and there; unknown ones cost nothing."""
        if self._inboxes.pop(key, None) is not None:
            self._send(pb.ToWorker(cancel=make_cancel([key])))

    def forget(self, key: SequenceKey) -> None:
        """Nothing more is wanted of a sequence that ended there by itself."""
        self._inboxes.pop(key, None)

    def tell_peers(self, peers: Iterable[pb.Peer]) -> None:
        """Prefill workers that this one will meet."""
        self._send(pb.ToWorker(peers=pb.Peers(peers=peers)))

    def beat(self) -> None:
        """A sign of life; left out while other messages wait, which are one as good."""
        if self.outbox.empty:
            self._beats += 1
            self._send(pb.ToWorker(heartbeat=pb.Heartbeat(sequence=self._beats)))

    def receive(self, message: pb.FromWorker) -> None:
        """Hands a message's parts to the requests that they belong to; what nobody waits for is dropped.

        Mismatch where the message makes no sense.
        """
        self.heard = time.monotonic()
        match message.WhichOneof("kind"):
            case "step":
                inboxes, incarnation = self._inboxes, self.incarnation
                for output in unpack_step(message.step, self._gateway):
                    inbox = inboxes.get(output.key)
                    if inbox is not None:
                        inbox.put(Output(incarnation, output))
            case "failure":
                failure = message.failure
                if failure.code == pb.FAILURE_CODE_DRAINING:
                    self.load.draining = True  # its next status may correct that
                key = SequenceKey(self._gateway, failure.request, failure.sample, failure.attempt)
                self._put(key, Failed(self.incarnation, failure.code, failure.message, failure.field))
            case "status":
                self._report(message.status)
            case "cache":
                self._apply_cache(message.cache)
            case "hello":
                raise Mismatch("a second hello")
            case _:  # what a later version may say
                pass

    def end(self, reason: str) -> None:
        """Tells every request. Idempotent; the first reason counts."""
        if self.ended.done():
            return
        self.ended.set_result(reason)
        self.outbox.close()
        inboxes = list(self._inboxes.values())
        self._inboxes.clear()
        for inbox in inboxes:
            inbox.put(Gone(self.incarnation, reason))

    def hold(self, on: bool, within_s: float) -> None:
        """Orders it to take nothing new, or to take work again; its status will tell that it does."""
        self._send(pb.ToWorker(drain=pb.Drain(drain=on, within_ms=round(within_s * 1000))))

    def become(self, role: Role) -> None:
        """Orders it to come back in another role."""
        self._send(pb.ToWorker(set_role=pb.SetRole(role=pb.Role.ValueType(role))))

    def watch_cache(self, contents: bool) -> None:
        """Orders it to tell from now on what its cached pages hold, or to leave that out again."""
        self._send(pb.ToWorker(watch_cache=pb.WatchCache(contents=contents)))

    def _apply_cache(self, events: pb.CacheEvents) -> None:
        self.cached.apply(events)
        if self.blocks is not None:
            self.blocks.apply(
                self.incarnation,
                events,
                cache_root=self.cache_root,
                page_size=self.format.page_size,
                limit=self.load.pages,
            )

    def _report(self, status: pb.Status) -> None:
        self.status = status
        before, self._prefilled = self._prefilled, (status.prefilled_tokens, status.prefill_us)
        if before is not None:  # what came before our session is its warm-up's
            tokens, spent = status.prefilled_tokens - before[0], (status.prefill_us - before[1]) / 1e6
            self.load.prompt_rate.add(tokens, spent, time.monotonic())
        self.load.decode_step_s = status.decode_step_us / 1e6
        self.load.pair_rates = pair_rates(status.pairs, MAX_PAIRS)
        self.load.report(
            free_pages=min(status.free_pages, self.load.pages),
            waiting_tokens=status.waiting_tokens,
            sequences=status.running + status.waiting,
            draining=status.draining,
        )

    def _put(self, key: SequenceKey, event: Event) -> None:
        inbox = self._inboxes.get(key)
        if inbox is not None:
            inbox.put(event)

    def _send(self, message: pb.ToWorker) -> None:
        if not self.outbox.put(message):
            self.end("it does not read what it is sent")
