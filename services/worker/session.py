"""The worker's side of its sessions with gateways: whose sequences run here, and what goes back to whom.

Knows no gRPC; `worker_servicer.py` moves the messages. All of it belongs to the event loop.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from ...engine.request import Request, SequenceKey, SequenceOutput, Work, sample_keys
from ...engine.validate import MAX_SAMPLES
from ...errors import InvalidRequest, Overloaded, TwostrokeError
from ...v1 import worker_pb2 as pb
from ..handover.handover import PeerAddress
from ..identity import ProcessIdentity
from . import wire
from .outbox import Outbox

log = logging.getLogger(__name__)

MAX_BACKLOG = 2048  # messages about pages and what they hold that wait for room
MAX_TRACE = 100  # characters; a W3C traceparent has 55


class Owner(Protocol):
    """What a session needs of `Sessions`."""

    clock: Callable[[], float]

    def admit(self, work: Work, live: int) -> None:
        """Raises what the gateway shall be told when a sequence is not taken."""
        ...

    def submit(self, request: Request, peer: PeerAddress | None) -> None:
        """Hands a sequence to the engine."""
        ...

    def drop(self, keys: Iterable[SequenceKey]) -> None:
        """Frees all that these sequences own."""
        ...

    def tell_peers(self, peers: list[PeerAddress]) -> None:
        """Workers to meet."""
        ...

    def hold(self, on: bool, within_s: float) -> None:
        """Takes nothing new, or takes work again."""
        ...

    def become(self, role: str) -> None:
        """Ends, to come back in another role."""
        ...

    def left(self, session: "Session") -> None:
        """The session ended."""
        ...

    def fewer(self) -> None:
        """A sequence ended."""
        ...


class Session:
    """One gateway's stream. Ends once; then every sequence of it is dropped in the engine, and `ended` says why."""

    def __init__(self, gateway: ProcessIdentity, owner: Owner, buffer_bytes: int) -> None:
        self.gateway = gateway
        self.outbox: Outbox[pb.FromWorker] = Outbox(buffer_bytes)
        self.ended: asyncio.Future[TwostrokeError | None] = asyncio.get_running_loop().create_future()
        self.heard = owner.clock()
        self.knows_cache = False  # was told all that the prefix cache has, and since then its changes
        self.wants_contents = False  # and what the pages hold
        self._backlog: deque[pb.FromWorker] = deque()
        self._owner = owner
        self._live: dict[int, dict[SequenceKey, Work]] = {}  # by request number
        self._count = 0

    @property
    def live(self) -> int:
        """Sequences that this gateway has here; a PREFILL one counts until its KV is handed over."""
        return self._count

    def receive(self, message: pb.ToWorker) -> None:
        """Acts on a message after the hello. Nothing that a gateway sends raises."""
        self.heard = self._owner.clock()
        match message.WhichOneof("kind"):
            case "submit":
                self._submit(message.submit)
            case "cancel":
                self._cancel(message.cancel)
            case "peers":
                self._owner.tell_peers(wire.read_peers(message.peers))
            case "drain":
                self._owner.hold(message.drain.drain, message.drain.within_ms / 1000)
            case "set_role":
                self._set_role(message.set_role.role)
            case "watch_cache":
                self._watch_cache(message.watch_cache.contents)
            case "hello":
                self.end(InvalidRequest("a second hello"))
            case _:  # a heartbeat, or what a later version may say
                pass

    def deliver(self, step: int, outputs: Sequence[SequenceOutput]) -> None:
        """Sends what one engine step made, less the sequences that were cancelled meanwhile."""
        wanted = [output for output in outputs if output.key in self._live.get(output.key.request, ())]
        for output in wanted:
            if output.finish is not None and self._live[output.key.request][output.key] is not Work.PREFILL:
                self._forget(output.key)
        if wanted:
            self._send(wire.pack_step(step, wanted))

    def fail(self, key: SequenceKey, error: Exception) -> None:
        """Sends a sequence's failure, unless it was cancelled meanwhile."""
        if self._forget(key):
            self._send(wire.pack_failure(key, error))

    def release(self, key: SequenceKey) -> None:
        """A PREFILL sequence's KV has been handed over: nothing of it is left here."""
        self._forget(key)

    def tell_status(self, status: pb.Status) -> None:
        """Sends the load. Also beside other messages: a busy worker's load counts most, and that it drains."""
        self._send(pb.FromWorker(status=status))

    def tell_cache(self, events: pb.CacheEvents) -> None:
        """Sends changes of the prefix cache; tokens go first: where room is short, all is told anew later, or with what
        pages hold, which may be much, bit by bit."""
        message = pb.FromWorker(cache=events)
        if self.wants_contents:
            self._backlog.append(message)
            self.flush_cache()
        elif not self.knows_cache or 2 * message.ByteSize() > self.outbox.free:
            self.knows_cache = False
        else:
            self._send(message)

    def flush_cache(self) -> None:
        """Sends what `tell_cache` kept, as far as there is room."""
        while self._backlog and 2 * self._backlog[0].ByteSize() <= self.outbox.free:
            self._send(self._backlog.popleft())
        if len(self._backlog) > MAX_BACKLOG:
            self._backlog.clear()
            self.knows_cache = False

    def _watch_cache(self, contents: bool) -> None:
        self.wants_contents, self.knows_cache = contents, False
        self._backlog.clear()

    def fail_all(self, error: TwostrokeError) -> None:
        """Gives all sequences up and tells the gateway about each."""
        keys = self._keys()
        self._owner.drop(keys)
        for key in keys:
            self.fail(key, error)

    def end(self, reason: TwostrokeError | None, *, flush: bool = False) -> None:
        """Drops all sequences at once and lets the stream end. Idempotent; the first reason counts."""
        if self.ended.done():
            return
        self.ended.set_result(reason)
        self.outbox.close(flush=flush)
        self._owner.drop(self._keys())
        self._live.clear()
        self._count = 0
        self._owner.left(self)

    def _keys(self) -> list[SequenceKey]:
        return [key for keys in self._live.values() for key in keys]

    def _set_role(self, role: pb.Role.ValueType) -> None:
        if role in wire.ROLES:
            self._owner.become(wire.ROLES[role])
        else:
            log.warning("gateway %s asks for role %d, which is unknown here", self.gateway.name, role)

    def _submit(self, submit: pb.Submit) -> None:
        key = wire.key_of(self.gateway.incarnation, submit)
        samples = sample_keys(key, min(max(1, submit.samples), MAX_SAMPLES))
        try:
            request, peer = wire.read_submit(self.gateway.incarnation, submit, self._owner.clock())
            if not self._live.get(key.request, {}).keys().isdisjoint(samples):
                raise InvalidRequest("this request, sample and attempt is running already", field="request")
            self._owner.admit(request.work, self._count + len(samples) - 1)
        except TwostrokeError as error:
            for sample in samples:
                self._send(wire.pack_failure(sample, error))
            return
        log.debug(
            "%s: %s, %d tokens, traceparent %s", key, request.work.name, len(request.prompt_ids), submit.traceparent
        )
        self._live.setdefault(key.request, {}).update(dict.fromkeys(samples, request.work))
        self._count += len(samples)
        self._owner.submit(request, peer)

    def _cancel(self, cancel: pb.Cancel) -> None:
        dropped: list[SequenceKey] = []
        for index, number in enumerate(cancel.requests):
            up_to = cancel.attempts[index] if index < len(cancel.attempts) else None  # None: all of them
            sample = cancel.samples[index] if index < len(cancel.samples) else None
            for key in self._live.get(number, ()):
                if (up_to is None or key.attempt <= up_to) and sample in (None, key.sample):
                    dropped.append(key)
        self._owner.drop(dropped)
        for key in dropped:
            self._forget(key)

    def _forget(self, key: SequenceKey) -> bool:
        keys = self._live.get(key.request)
        if keys is None or keys.pop(key, None) is None:
            return False
        if not keys:
            del self._live[key.request]
        self._count -= 1
        self._owner.fewer()
        return True

    def _send(self, message: pb.FromWorker) -> None:
        if not self.outbox.put(message) and not self.ended.done():
            log.warning("gateway %s does not read: its session ends", self.gateway.name)
            self.end(Overloaded("the gateway does not read: its buffer is full"))
