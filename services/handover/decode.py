"""The decode side of the hand-over: `EngineCore` and `Reader` joined; reserved pages become tickets, then KV."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor

from ...engine.batch import LayerHook, StepWait
from ...engine.core import EngineCore
from ...engine.request import (
    FinishReason,
    Request,
    Reservation,
    SequenceKey,
    SequenceOutput,
    SequenceTimings,
    StepResult,
    Token,
    Work,
)
from ...errors import HandoverExpired, InvalidRequest, TwostrokeError
from ...kvtransfer.messages import (
    Arrived,
    FirstToken,
    FromReader,
    FromWriter,
    Instruction,
    Lost,
    Progress,
    Resend,
    Send,
    Unhold,
    Verify,
)
from ...kvtransfer.pool_pages import CpuDigester, Digester, pool_bytes
from ...kvtransfer.reader import Reader
from .handover import Emit, PeerAddress, Post, Traffic
from .inbox import Inbox, always
from .known_writers import KnownWriters
from .link_events import WriterLinks
from .rehearsal import Rehearsal

log = logging.getLogger(__name__)

_First: TypeAlias = tuple[Token, FinishReason | None]

_DIED = "the prefill worker is gone"


@dataclass(slots=True)
class _Awaited:
    """A DECODE sequence whose KV has not arrived."""

    peer: PeerAddress
    first_index: int  # output index of its token 0
    unsent: Reservation | None = None  # made before a link with the writer ever stood


class DecodeHandover:
    """Implements `Handover` for role `decode`, and `WriterEvents` for its links.

    A writer gets its first ticket only after a link with it stood, that is after its death became provable where it can
    be. So pages reserved for a writer that never comes are free again as soon as that is given up.
    """

    hook: LayerHook | None = None

    def __init__(
        self,
        core: EngineCore,
        links: WriterLinks,
        pool: Tensor,  # [layers, pages, 2, kv_heads, page_size, head_dim], the memory that was offered to writers
        *,
        pool_id: int,
        ticket_valid_s: float = 60.0,
        digester: Digester | None = None,
        rehearse: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`pool_id`: as in the offer. `ticket_valid_s`: how long a writer may take, from its ticket on. `digester`: of
        the pool's pages; by default the CPU. `rehearse`: of the engine's runner, called while KV comes to an engine
        that has nothing else to do: its first step is launched the sooner.
        """
        layers, page_size = pool.shape[0], pool.shape[4]
        self.reader = Reader(layers=layers, page_size=page_size, pool=pool_id, valid_s=ticket_valid_s)
        self.traffic = Traffic(mismatches=self.reader.mismatches)
        self._core = core
        self._links = links
        self._digester = digester or CpuDigester(pool_bytes(pool))
        self._inbox = Inbox(pool.device, ordered=True)
        self.wait: StepWait | None = self._inbox.wait
        self._rehearsal = Rehearsal(
            self.reader,
            links,
            (rehearse, self._rehearse_digests),
            layers=layers,
            eager=pool.device.type == "cuda",  # a writer on a CPU needs the cores itself
            clock=clock,
        )
        self._clock = clock
        self._emit: Emit
        self._awaited: dict[SequenceKey, _Awaited] = {}
        self._writers = KnownWriters()
        self._outbox: dict[int, list[FromReader]] = {}
        self._result = StepResult()

    def close(self) -> None:
        """Ends its threads, once the engine's has ended."""
        self._inbox.close()
        self._digester.close()

    # Event loop

    def attach(self, post: Post, emit: Emit) -> None:
        """See `Handover`."""
        self._emit = emit
        self._inbox.attach(post)
        self._links.attach(self)

    def writer_up(self, writer: int) -> None:
        """See `WriterEvents`."""
        self._inbox.tell(lambda: self._on_up(writer))

    def writer_down(self, writer: int) -> None:
        """See `WriterEvents`."""
        self._inbox.tell(lambda: self._on_down(writer))

    def writer_dead(self, writer: int) -> None:
        """See `WriterEvents`."""
        self._inbox.tell(lambda: self._on_dead(writer))

    def writer_refused(self, writer: int, reason: str, final: bool) -> None:
        """See `WriterEvents`."""
        self._inbox.tell(lambda: self._on_refused(writer, reason, final))

    def writer_replaced(self, writer: int, reason: str) -> None:
        """See `WriterEvents`."""
        self._inbox.tell(lambda: self._on_refused(writer, reason, True))

    def received(self, writer: int, message: FromWriter) -> None:
        """See `WriterEvents`."""
        self._inbox.tell(lambda: self._on_message(writer, message), always)

    # Engine thread: Handover

    def look(self) -> None:
        """See `Handover`."""
        self._rehearsal.look()

    @property
    def awake_until(self) -> float:
        """See `Handover`."""
        return self._rehearsal.until

    def submitted(self, request: Request, peer: PeerAddress | None) -> None:
        """See `Handover`."""
        if request.work is not Work.DECODE:
            return
        key = request.key
        if peer is None or peer.incarnation != request.writer or request.writer == 0:
            error = InvalidRequest("the prefill worker is not named", field="peer")
            self._result.failures += [(sample, error) for sample in self._core.abandon(key)]
        else:
            self._awaited[key] = _Awaited(peer, len(request.output_ids))
            if (reason := self._writers.why_gone(peer.incarnation)) is not None:
                self._lose(key, reason)
            elif not self._writers.linked(peer.incarnation):
                self._links.want((peer,))
        self._flush()

    def gone(self, key: SequenceKey) -> None:
        """See `Handover`."""
        if self._awaited.pop(key, None) is not None:
            self._run(self.reader.request_gone(key, self._clock()))
        self._flush()  # what waited for a step that this one would have brought about, too
        self._over_if_idle()

    def stepped(self, result: StepResult) -> list[SequenceOutput]:
        """What a step held up, and what `_flush` kept for it; then sends tickets for what was reserved."""
        self._inbox.step_ended()
        self._rehearsal.over()
        for reservation in result.reserved:
            awaited = self._awaited.get(reservation.key)
            if awaited is None:
                self._core.abandon(reservation.key)
            elif (reason := self._writers.why_gone(reservation.writer)) is not None:
                self._lose(reservation.key, reason)
            elif self._writers.met(reservation.writer):
                self._open(reservation)
            else:
                awaited.unsent = reservation
                self._links.want((awaited.peer,))
        self._send()
        self._flush()
        return []

    def tick(self, now: float) -> None:
        """See `Handover`."""
        self._run(self.reader.tick(now))
        self._flush()

    def check(self, *, idle: bool) -> None:
        """See `Handover`. A ticket that was given up may be open while no request is left, until its writer answers."""
        self.reader.check(idle=idle and not self.reader.open_tickets())
        if idle and self._awaited:
            raise TwostrokeError(f"{len(self._awaited)} sequences still await their KV")

    # Engine thread: events of links

    def _on_up(self, writer: int) -> None:
        self._writers.up(writer)
        self._run(self.reader.writer_up(writer, self._clock()))
        for awaited in self._of(writer).values():
            if awaited.unsent is not None:
                reservation, awaited.unsent = awaited.unsent, None
                self._open(reservation)
        self._flush()

    def _on_down(self, writer: int) -> None:
        self._writers.down(writer)
        self._run(self.reader.writer_down(writer, self._clock()))
        self._flush()

    def _on_dead(self, writer: int) -> None:
        self._writers.gone(writer, _DIED, dead=True)
        self._run(self.reader.writer_dead(writer))
        for key in self._of(writer):
            self._lose(key, _DIED)
        self._flush()

    def _on_refused(self, writer: int, reason: str, final: bool) -> None:
        """No link with it, now or (`final`) ever."""
        if final:
            self._writers.gone(writer, reason, dead=False)
        if final or not self._writers.met(writer):
            for key in self._of(writer):
                self._lose(key, reason)
        self._flush()

    def _on_message(self, writer: int, message: FromWriter) -> None:
        self._run(self.reader.receive(writer, message, self._clock()))
        self._flush()
        if isinstance(message, Progress) and not self._inbox.in_step and not self._core.has_work():
            self._rehearsal.told(writer, message)

    def _over_if_idle(self) -> None:
        """Else the step that follows ends the rehearsal."""
        if not self._core.has_work():
            self._rehearsal.over()

    def _rehearse_digests(self) -> None:
        page_0 = Verify(writer=0, ticket=0, first_layer=0, layers=1, ordinal=0, pages=(0,))
        self._digester.start(page_0, lambda _: self._inbox.tell(lambda: None, always))

    # What they have in common

    def _of(self, writer: int) -> dict[SequenceKey, _Awaited]:
        return {key: awaited for key, awaited in self._awaited.items() if awaited.peer.incarnation == writer}

    def _open(self, reservation: Reservation) -> None:
        writer, pages = reservation.writer, reservation.pages
        ticket, instructions = self.reader.open(
            writer, reservation.key, pages, reservation.first_position, self._clock()
        )
        self.traffic.tickets += 1
        self._core.pool.hold((writer, ticket), pages)
        self._run(instructions)

    def _lose(self, key: SequenceKey, reason: str) -> None:
        """Gives a sequence up; what its ticket holds stays held until the writer cannot touch it any more."""
        if self._awaited.pop(key, None) is not None:
            self._fail(key, reason)
        self._run(self.reader.request_gone(key, self._clock()))

    def _fail(self, key: SequenceKey, reason: str) -> None:
        self._result.failures += [(sample, HandoverExpired(reason)) for sample in self._core.abandon(key)]

    def _run(self, instructions: Iterable[Instruction]) -> None:
        todo = deque(instructions)
        while todo:
            match todo.popleft():
                case Send(peer=peer, message=message):
                    if isinstance(message, Resend):
                        log.warning("%d pages of %016x did not arrive whole: once more", len(message.ordinals), peer)
                    self._outbox.setdefault(peer, []).append(message)  # type: ignore[arg-type]
                case Verify() as verify:
                    todo.extend(self._verify(verify))
                case Arrived() as arrived:
                    self._inbox.engine(lambda arrived=arrived: self._arrived(arrived))  # type: ignore[misc]
                case Lost(key=SequenceKey() as key, reason=reason):
                    self._inbox.engine(lambda key=key, reason=reason: self._lost(key, reason))  # type: ignore[misc]
                case Unhold(writer=writer, ticket=ticket):
                    self._inbox.engine(lambda hold=(writer, ticket): self._unhold(hold))  # type: ignore[misc]
                case other:
                    raise TwostrokeError(f"not an instruction for a reader: {other}")

    def _lost(self, key: SequenceKey, reason: str) -> None:
        if self._awaited.pop(key, None) is not None:
            self._fail(key, reason)

    def _unhold(self, hold: tuple[int, int]) -> None:
        self._core.pool.unhold(hold)

    def _verify(self, verify: Verify) -> list[Instruction]:
        """Starts to compute digests. What is there at once is told at once."""
        engine, at_once = threading.get_ident(), list[bytes]()

        def digested(digests: bytes) -> None:
            if threading.get_ident() == engine:
                at_once.append(digests)
            else:
                self._inbox.tell(lambda: self._on_digests(verify, digests), always)

        self._digester.start(verify, digested)
        return self._digested(verify, at_once[0]) if at_once else []

    def _on_digests(self, verify: Verify, digests: bytes) -> None:
        self._run(self._digested(verify, digests))
        self._flush()

    def _digested(self, verify: Verify, digests: bytes) -> list[Instruction]:
        return self.reader.digested(
            verify.writer,
            verify.ticket,
            verify.first_layer,
            verify.ordinal,
            digests,
            verify.layers,
            len(verify.pages),
        )

    def _arrived(self, arrived: Arrived) -> None:
        self._rehearsal.sleep()
        self._arrive(arrived)
        self._over_if_idle()

    def _arrive(self, arrived: Arrived) -> None:
        key = arrived.key
        awaited = self._awaited.pop(key, None) if isinstance(key, SequenceKey) else None
        if awaited is None or not isinstance(key, SequenceKey):
            return
        firsts = {key._replace(sample=first.sample): _token(first) for first in arrived.first_tokens}
        measured = _timings(arrived.first_tokens[0])  # of the prompt, which the samples share
        if not arrived.verified:  # all is over with token 0: what lies in the pages must not become findable
            self._ended(key, awaited.first_index, firsts, measured)
            return
        try:
            self._result.outputs += self._core.samples_arrived(key, firsts, measured)
        except TwostrokeError as error:
            self._fail(key, error.message)
        except Exception as error:  # a fault of ours: its pages must not stay held because of it
            log.exception("KV that arrived could not be taken")
            self._fail(key, f"the KV could not be taken: {error}")

    def _ended(
        self, key: SequenceKey, index: int, firsts: Mapping[SequenceKey, _First], measured: SequenceTimings
    ) -> None:
        for sample in self._core.abandon(key):
            if sample in firsts:
                token, finish = firsts[sample]
                self._result.outputs.append(SequenceOutput(sample, index, [token], finish, measured))
            else:
                self._result.failures.append((sample, HandoverExpired("the prefill worker sent no token 0")))

    def _flush(self) -> None:
        """One event's messages cross to the loop at once, or behind the launch that is due, which a loop at work would
        hold up (`stepped`); its outputs and failures go to the sessions.
        """
        if not self._core.launches_only():
            self._send()
        if not self._inbox.in_step and (self._result.outputs or self._result.failures):
            result, self._result = self._result, StepResult()
            self._emit(result)

    def _send(self) -> None:
        if self._outbox:
            outbox, self._outbox = self._outbox, {}
            self._links.send(outbox)


def _token(first: FirstToken) -> _First:
    return Token(first.token_id, first.logprobs), FinishReason(first.finish) if first.finish else None


def _timings(first: FirstToken) -> SequenceTimings:
    """What the prefill worker measured: told again, as its own message may be late or lost."""
    return SequenceTimings(queue=first.queue, prefill=first.prefill, cached_tokens=first.cached_tokens)
