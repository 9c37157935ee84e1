"""The prefill side of the hand-over: `EngineCore` and `Writer` joined; KV is pushed within the step that makes it."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from ...engine.batch import LayerHook, StepWait
from ...engine.core import EngineCore
from ...engine.request import (
    ChunkProgress,
    Request,
    SequenceKey,
    SequenceOutput,
    SequenceTimings,
    StepResult,
    Work,
    sample_keys,
)
from ...engine.sequence import State
from ...errors import InvalidRequest, TwostrokeError
from ...kvtransfer.messages import (
    ClosePool,
    Copy,
    FirstToken,
    FromReader,
    FromWriter,
    Instruction,
    Release,
    Send,
    Ticket,
    Ticketed,
)
from ...kvtransfer.peer_pools import PeerPools
from ...kvtransfer.writer import Writer
from .handover import Emit, PairSpeed, PeerAddress, Post, Traffic
from .inbox import Inbox, always
from .link_events import ReaderLinks
from .pool_opener import Opened
from .source_holds import SourceHolds
from .wire_link import PoolOffer

log = logging.getLogger(__name__)

_WITH_PAGES = (State.RUNNING, State.HELD)
_PROGRESS_S = 0.005  # within a step, readers are told no more often than this what was done at once


@dataclass(slots=True)
class _Prefill:
    """A PREFILL sequence, from its submission until the engine lets it go."""

    samples: int
    first: tuple[FirstToken, ...] = ()  # once sampled; kept over a preemption, which does not sample again


class PrefillHandover:
    """Implements `Handover` for role `prefill`, and `ReaderEvents` for its links.

    What links tell, and copies that are done, is queued, and handled between steps or, in a long prefill, between its
    layers and while the host waits for it: a ticket that comes in the middle of a step is served from that layer on.
    Within a step the engine must not be touched, so what concerns it waits for the step's end; and a ticket for a
    sequence that has no pages waits as well, because it may have lost them by this very step. Steps may overlap: the
    hook tells what the next one will write, `stepped` what the one before it has brought about.
    """

    def __init__(
        self,
        core: EngineCore,
        links: ReaderLinks,
        pool: Tensor,  # [layers, pages, 2, kv_heads, page_size, head_dim]
        *,
        written: Callable[[int], None] = lambda layer: None,
        ends: Sequence[int] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`pool`: the engine's, from which pages are pushed. `ends`: the last layer of each stretch of layers whose
        pages leave together; each layer's leave alone by default. `written`: told, on the engine's thread, when a
        step's write of a stretch is launched, by its end, before any copy that reads it (`CudaSource.written`).
        """
        layers = pool.shape[0]
        self.writer = Writer(layers=layers, page_size=pool.shape[4])
        ends = range(layers) if ends is None else ends
        self._stretches = {
            end: range(begin, end + 1) for begin, end in zip((0, *(e + 1 for e in ends)), ends, strict=False)
        }
        self._last_but_one = ends[-2] if len(ends) > 1 else -1
        self.hook: LayerHook | None = self._hook
        self._inbox = Inbox(pool.device, ordered=False, then=self._tell_progress)
        self.wait: StepWait | None = self._inbox.wait
        self.traffic = Traffic()
        self.awake_until = 0.0  # between steps it waits for nothing that comes at once
        self._core = core
        self._links = links
        self._pools = PeerPools()
        self._reads = SourceHolds(core.pool)
        self._written = written
        self._clock = clock
        self._emit: Emit
        self._prefills: dict[SequenceKey, _Prefill] = {}
        self._told = 0.0  # when progress was told last
        self._failed: dict[SequenceKey, Exception] = {}  # in this step's hook
        self._outbox: dict[int, list[FromWriter]] = {}
        self._result = StepResult()

    def close(self) -> None:
        """Lets go of all pools, once the engine's thread has ended."""
        self._inbox.close()
        self._pools.close()

    # Event loop

    def attach(self, post: Post, emit: Emit) -> None:
        """See `Handover`."""
        self._emit = emit
        self._inbox.attach(post)
        self._links.attach(self)

    def reader_up(self, reader: int, offer: PoolOffer, opened: Opened) -> None:
        """See `ReaderEvents`."""
        self._tell(lambda: self._on_up(reader, offer, opened))

    def reader_down(self, reader: int) -> None:
        """See `ReaderEvents`."""
        self._tell(lambda: self.writer.reader_down(reader, self._clock()))

    def reader_dead(self, reader: int) -> None:
        """See `ReaderEvents`."""
        self._tell(lambda: self._on_dead(reader))

    def received(self, reader: int, message: FromReader) -> None:
        """See `ReaderEvents`."""
        key = message.key if isinstance(message, Ticket) and isinstance(message.key, SequenceKey) else None
        self._tell(lambda: self.writer.receive(reader, message, self._clock()), key)

    def _tell(self, event: Callable[[], list[Instruction]], key: SequenceKey | None = None) -> None:
        """`key`: of a ticket, which waits where its sequence has no pages: it may have lost them by this very step."""
        within = always if key is None else lambda: self._core.state_of(key) in _WITH_PAGES
        self._inbox.tell(lambda: self._handle(event()), within)

    # Engine thread: Handover

    def look(self) -> None:
        """See `Handover`. What comes concerns a step, if anything."""

    def submitted(self, request: Request, peer: PeerAddress | None) -> None:
        """See `Handover`."""
        if request.work is not Work.PREFILL:
            return
        if peer is None or peer.incarnation == 0:
            error = InvalidRequest("the decode worker is not named", field="peer")
            self._result.failures += [(key, error) for key in self._core.abandon(request.key)]
        else:
            self._prefills[request.key] = _Prefill(request.samples)
            self._run(self.writer.expect(request.key, peer.incarnation))
        self._flush()

    def gone(self, key: SequenceKey) -> None:
        """See `Handover`."""
        if self._prefills.pop(key, None) is not None:
            self._run(self.writer.request_gone(key))
            self._flush()

    def stepped(self, result: StepResult) -> list[SequenceOutput]:
        """Tells the machine and readers of preemptions and first tokens; then what had to wait for the step's end."""
        dropped = {key for key, _ in result.failures}
        for key in dropped:  # before a ticket is served from pages that are no longer theirs
            self.gone(key)
        for key in result.preempted:
            if key in self._prefills:
                self._run(self.writer.restarted(key))
        told = {output.key: output for output in result.outputs if output.tokens}
        for key in told:
            if (prefill := self._prefills.get(key)) is not None:
                prefill.first = tuple(_first_token(told[sample]) for sample in sample_keys(key, prefill.samples))
        failed, self._failed = self._failed, {}
        for key in failed.keys() - dropped:
            self._fail(key, failed[key])
        for key in result.prefilled:
            if key not in dropped and key not in result.preempted:
                self._done(key)
        self._flush_messages()  # a client waits
        self._inbox.step_ended()
        self._inbox.drain()
        self._run(self.writer.step_ended())
        self._flush()
        return []

    def tick(self, now: float) -> None:
        """See `Handover`."""
        self._run(self.writer.tick(now))
        self._flush()

    def check(self, *, idle: bool) -> None:
        """See `Handover`. A ticket may be open while no request is left: its request may be on its way."""
        self.writer.check(idle=idle and not self.writer.open_tickets())
        if idle and self._prefills:
            raise TwostrokeError(f"{len(self._prefills)} prefilled sequences are left")

    # Engine thread: within a step

    def _hook(self, layer: int, progress: list[ChunkProgress]) -> None:
        """After each layer of a step. Must not raise: a failure costs the sequence, not the step."""
        layers = self._stretches.get(layer)
        if layers is None:
            return
        self._written(layer)
        self._inbox.within_step()
        for chunk in progress:
            if chunk.key in self._failed:
                continue
            try:
                self._run(self.writer.pages_ready(chunk.key, layers, chunk.pages, chunk.ready, chunk.total))
            except Exception as error:
                log.exception("the pages of a layer could not be pushed")
                self._failed[chunk.key] = error
        self._flush_messages()

    def _tell_progress(self) -> None:
        """So that readers digest what has landed while the rest is computed."""
        if (now := self._clock()) >= self._told + _PROGRESS_S:
            self._told = now
            self._run(self.writer.step_ended())
            self._flush()

    def _fail(self, key: SequenceKey, error: Exception) -> None:
        samples = self._core.abandon(key)
        if self._prefills.pop(key, None) is not None:
            failure = TwostrokeError(f"the KV could not be pushed: {error}")
            self._result.failures += [(sample, failure) for sample in samples]
            self._run(self.writer.request_gone(key))

    def _done(self, key: SequenceKey) -> None:
        """The whole prompt is computed, for the first time or anew."""
        prefill = self._prefills.get(key)
        if prefill is not None and prefill.first:
            self._run(self.writer.prompt_done(key, prefill.first))
            if self._core.state_of(key) is None:  # it was released before
                self._prefills.pop(key, None)

    # Engine thread: what both have in common

    def _handle(self, instructions: Iterable[Instruction]) -> None:
        self._run(instructions)
        self._flush()

    def _on_up(self, reader: int, offer: PoolOffer, opened: Opened) -> list[Instruction]:
        self._pools.add(reader, opened.transport)
        instructions = self.writer.reader_up(reader, self._clock(), pool=offer.pool, pool_pages=offer.pages)
        if not any(isinstance(instruction, ClosePool) for instruction in instructions):  # it lives
            pair = PairSpeed(opened.transport.kind, opened.gb_per_s)
            self.traffic.pairs = {**self.traffic.pairs, reader: pair}
        return instructions

    def _on_dead(self, reader: int) -> list[Instruction]:
        self.traffic.pairs = {key: pair for key, pair in self.traffic.pairs.items() if key != reader}
        self._pools.gone(reader)
        return self.writer.reader_dead(reader)

    def _run(self, instructions: Iterable[Instruction]) -> None:
        todo = deque(instructions)
        while todo:
            match todo.popleft():
                case Copy() as copy:
                    copies = [copy]
                    while todo and _follows(copies[-1], todo[0]):
                        copies.append(todo.popleft())  # type: ignore[arg-type]
                    todo.extend(self._push(copies))
                case Send(peer=peer, message=message):
                    self._outbox.setdefault(peer, []).append(message)  # type: ignore[arg-type]
                case Ticketed(key=SequenceKey() as key):
                    self.traffic.tickets += 1
                    self._inbox.engine(lambda key=key: self._core.ticketed(key))  # type: ignore[misc]
                case Release(key=SequenceKey() as key):
                    self._inbox.engine(lambda key=key: self._release(key))  # type: ignore[misc]
                case ClosePool(reader=reader):
                    self._pools.drop(reader)
                case other:
                    raise TwostrokeError(f"not an instruction for a writer: {other}")

    def _push(self, copies: Sequence[Copy]) -> list[Instruction]:
        """Starts copies. What is done at once is told at once; else their pages are held until it is."""
        self.traffic.pages += 0 if copies[0].layer else len(copies[0].src)
        engine, at_once = threading.get_ident(), list[tuple[Sequence[Copy], bytes]]()

        def landed(copies: Sequence[Copy], digests: bytes) -> None:
            if threading.get_ident() == engine:
                at_once.append((copies, digests))
            else:
                self._tell(lambda: self._copied(copies, digests))

        self._pools.push(copies, landed)
        done = {copy.copy for landed, _ in at_once for copy in landed}
        self._reads.begin([copy for copy in copies if copy.copy not in done])  # `_copied` runs on this thread: after it
        return [instruction for told in at_once for instruction in self._landed(*told)]

    def _copied(self, copies: Sequence[Copy], digests: bytes) -> list[Instruction]:
        """The host saw copies completed that were not done at once. Readers hear of it: they digest what has landed."""
        self._inbox.engine(lambda: self._reads.end(copy.copy for copy in copies))
        if copies[-1].layer == self._last_but_one and self._inbox.in_step:
            self._inbox.stay_awake()
        return [*self._landed(copies, digests), *self.writer.step_ended()]

    def _landed(self, copies: Sequence[Copy], digests: bytes) -> list[Instruction]:
        size = len(digests) // len(copies)
        return [
            instruction
            for index, copy in enumerate(copies)
            for instruction in self.writer.copied(copy.copy, digests[index * size : (index + 1) * size])
        ]

    def _release(self, key: SequenceKey) -> None:
        self._core.release(key)
        if self._core.state_of(key) is None:
            self._prefills.pop(key, None)

    def _flush(self) -> None:
        """One event's messages go at once, by a lane or over the loop; its failures go to the sessions."""
        self._flush_messages()
        if self._result.failures and not self._inbox.in_step:
            result, self._result = self._result, StepResult()
            self._emit(result)

    def _flush_messages(self) -> None:
        if self._outbox:
            outbox, self._outbox = self._outbox, {}
            self._links.send(outbox)


def _follows(copy: Copy, instruction: Instruction) -> bool:
    """Whether it copies the same pages in the next layer."""
    return isinstance(instruction, Copy) and replace(copy, copy=instruction.copy, layer=copy.layer + 1) == instruction


def _first_token(output: SequenceOutput) -> FirstToken:
    token, told = output.tokens[0], output.timings or SequenceTimings()
    return FirstToken(
        sample=output.key.sample,
        token_id=token.token_id,
        finish=int(output.finish or 0),
        logprobs=token.logprobs,
        queue=told.queue,
        prefill=told.prefill,
        cached_tokens=told.cached_tokens,
    )
