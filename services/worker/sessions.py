"""All sessions of a worker: routes results to gateways, admits sequences, tells loads, drains."""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable

from ...engine.request import Request, SequenceKey, StepResult, Work
from ...errors import InvalidRequest, Overloaded, TwostrokeError, Unavailable
from ...v1 import worker_pb2 as pb
from ..durations import microseconds
from ..handover.handover import PeerAddress
from ..identity import ProcessIdentity
from . import wire
from .driver import Driver
from .session import Session

log = logging.getLogger(__name__)

STATUS_S = 1.0
MAX_SESSIONS = 64
MAX_LIVE = 4096  # sequences of one gateway

WORKS = {
    "prefill": frozenset({Work.PREFILL, Work.ALL}),
    "decode": frozenset({Work.DECODE, Work.ALL}),
    "both": frozenset({Work.ALL}),
}


class Sessions:
    """At most one session a gateway incarnation: a later one replaces it, as the earlier one's stream must be lost."""

    def __init__(
        self,
        role: str,
        *,
        buffer_bytes: int,
        silence_s: float,
        clock: Callable[[], float] = time.monotonic,
        on_peers: Callable[[list[PeerAddress]], None] = lambda _: None,
    ) -> None:
        """`role`: prefill, decode or both. `buffer_bytes`: of messages that wait for a gateway. `clock`: seconds."""
        self.clock = clock
        self.draining = False  # it takes nothing new
        self.next_role: str | None = None  # once it was told to change
        self.role_wanted = asyncio.Event()
        self._ending = False  # draining for the last time
        self._cut: asyncio.TimerHandle | None = None
        self._role = role
        self._buffer_bytes = buffer_bytes
        self._silence_s = silence_s
        self._on_peers = on_peers
        self._driver: Driver | None = None
        self._open: dict[int, Session] = {}
        self._beats = 0
        self._last_beat = clock()
        self._empty = asyncio.Event()

    def attach(self, driver: Driver) -> None:
        """Before the first session: the engine that does the work; its results come to `on_result`."""
        self._driver = driver

    # What the servicer calls

    def open(self, gateway: ProcessIdentity) -> Session:
        """A new session. Unavailable at the end or without an engine, Overloaded where there are too many."""
        if self._driver is None or self._ending:
            raise Unavailable("the worker is draining" if self._ending else "the worker is not ready")
        earlier = self._open.get(gateway.incarnation)
        if earlier is not None:
            log.warning("gateway %s opened another session: the earlier one ends", gateway.name)
            earlier.end(Unavailable("a later session of the same gateway took over"))
        if len(self._open) >= MAX_SESSIONS:
            raise Overloaded(f"{MAX_SESSIONS} gateways are connected already")
        session = Session(gateway, self, self._buffer_bytes)
        self._open[gateway.incarnation] = session
        log.info("gateway %s connected", gateway.name)
        return session

    def all(self) -> tuple[Session, ...]:
        """Those that are open."""
        return tuple(self._open.values())

    async def run(self) -> None:
        """Each second: tells every gateway the load, and ends the sessions of those that went silent."""
        while True:
            self.beat()
            await asyncio.sleep(STATUS_S)

    def beat(self) -> None:
        """One second's work of `run`."""
        self._beats += 1
        status = self.status()
        now = self.clock()
        late = now - self._last_beat - STATUS_S  # we were stopped or starved: what gateways sent then is still unread
        self._last_beat = now
        for session in tuple(self._open.values()):
            session.heard += max(0.0, late)
            if now - session.heard > self._silence_s:
                log.warning("gateway %s is silent for %.0f s: its session ends", session.gateway.name, self._silence_s)
                session.end(Unavailable(f"nothing heard for {self._silence_s:g} s"))
            else:
                session.tell_status(status)

    def status(self) -> pb.Status:
        """The engine's last snapshot: it goes out also when a step hangs, and `steps` then stands still."""
        load = self._engine.load
        return pb.Status(
            sequence=self._beats,
            free_pages=load.free_pages,
            pages=load.pages,
            ticket_pages=load.held_pages,
            running=load.running,
            waiting=load.waiting,
            waiting_tokens=load.waiting_tokens,
            steps=self._engine.steps,
            prefilled_tokens=load.prefilled_tokens,
            pushed_pages=self._engine.handover.traffic.pages,
            tickets=self._engine.handover.traffic.tickets,
            damaged_pages=self._engine.handover.traffic.mismatches.pages,
            resent_pages=self._engine.handover.traffic.mismatches.resent,
            preemptions=load.preemptions,
            damaged_tickets=self._engine.handover.traffic.mismatches.tickets,
            draining=self.draining,
            covered_positions=load.covered_positions,
            unused_positions=load.unused_positions,
            mean_length=load.mean_length,
            prefill_us=microseconds(load.prefill_s),
            decode_step_us=microseconds(load.decode_step_s),
            pairs=[wire.pack_pair(reader, pair) for reader, pair in self._engine.handover.traffic.pairs.items()],
        )

    # What the driver calls

    def on_result(self, result: StepResult) -> None:
        """Routes what a step made; what belongs to no session any more is dropped."""
        for gateway, outputs in wire.by_gateway(result.outputs).items():
            if (session := self._open.get(gateway)) is not None:
                session.deliver(result.step, outputs)
        for key, error in result.failures:
            if (session := self._open.get(key.gateway)) is not None:
                session.fail(key, error)

    def on_released(self, keys: Iterable[SequenceKey]) -> None:
        """PREFILL sequences whose KV has been handed over."""
        for key in keys:
            if (session := self._open.get(key.gateway)) is not None:
                session.release(key)

    # What a session calls

    def admit(self, work: Work, live: int) -> None:
        """InvalidRequest for work that this role does not do, Unavailable when nothing more is taken."""
        if work not in WORKS[self._role]:
            raise InvalidRequest(f"a worker of role {self._role} does no {work.name.lower()} work", field="work")
        if self.draining:
            raise Unavailable("the worker is draining")
        if live >= MAX_LIVE:
            raise Unavailable(f"{MAX_LIVE} sequences of this gateway are here already")

    def submit(self, request: Request, peer: PeerAddress | None) -> None:
        """Hands a sequence to the engine."""
        self._engine.submit(request, peer)

    def drop(self, keys: Iterable[SequenceKey]) -> None:
        """Frees all that these sequences own, at once."""
        self._engine.drop(keys)

    def tell_peers(self, peers: list[PeerAddress]) -> None:
        """Workers that a gateway expects this one to meet."""
        self._on_peers(peers)

    def hold(self, on: bool, within_s: float) -> None:
        """Takes nothing new, for all gateways, or takes work again; the last order counts.

        `within_s`: what runs longer is given up, and its gateways replay it elsewhere; 0: nothing is.
        """
        if self._ending:
            return
        if on != self.draining:
            log.info("draining: nothing new is taken" if on else "taking work again")
        self.draining = on
        if self._cut is not None:
            self._cut.cancel()
            self._cut = None
        if on and within_s > 0:
            self._cut = asyncio.get_running_loop().call_later(within_s, self._cut_all)
        self.beat()

    def become(self, role: str) -> None:
        """The process shall drain, end, and come back in this role. The first order counts."""
        if self._ending or self.next_role is not None:
            return
        if role == self._role:
            self.hold(False, 0.0)
            return
        log.info("changing the role from %s to %s", self._role, role)
        self.next_role = role
        self.role_wanted.set()

    def left(self, session: Session) -> None:
        """A session ended."""
        if self._open.get(session.gateway.incarnation) is session:
            del self._open[session.gateway.incarnation]
        log.info("gateway %s left", session.gateway.name)
        self.fewer()

    def fewer(self) -> None:
        """A sequence ended."""
        if self.draining and not self.live:
            self._empty.set()

    # The end

    @property
    def live(self) -> int:
        """Sequences of all gateways."""
        return sum(session.live for session in self._open.values())

    async def drain(self, seconds: float) -> bool:
        """Takes nothing new and waits for what runs, at most so long; then fails the rest. True: nothing was cut."""
        self.draining = self._ending = True
        self.beat()
        self.fewer()
        try:
            async with asyncio.timeout(seconds):
                await self._empty.wait()
        except TimeoutError:
            self._cut_all()
            return False
        return True

    def _cut_all(self) -> None:
        if self.live:
            log.warning("%d sequences are given up: draining takes too long", self.live)
        for session in tuple(self._open.values()):
            session.fail_all(Unavailable("the worker drains and gave it up"))

    def end_all(self, reason: TwostrokeError) -> None:
        """Ends every session; what waits for a gateway may still leave."""
        for session in tuple(self._open.values()):
            session.end(reason, flush=True)

    @property
    def _engine(self) -> Driver:
        if self._driver is None:
            raise Unavailable("the worker is not ready")
        return self._driver
