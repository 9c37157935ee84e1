"""One attempt of a request on its workers: who runs which part, and what they answer, as one stream."""

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ...engine.request import FinishReason, SequenceKey, SequenceOutput, SequenceTimings, Token
from ...errors import DeadlineExceeded, InvalidRequest, TwostrokeError, Unavailable
from ...v1 import worker_pb2 as pb
from .answer import WorkerReport
from .inbox import Event, Failed, Gone, Inbox, Output
from .merge import Merger
from .parameters import request_field
from .prompt_scores import PromptScores
from .worker_session import RETRY_S, WorkerSession


@dataclass(slots=True)
class Part:
    """A worker's share of the request. `tokens` and `pages` are what the worker's load was charged with."""

    session: WorkerSession
    prefills: bool
    decodes: bool
    tokens: int
    pages: int
    heard: bool = False  # it has sent tokens
    heard_at: float = 0.0  # then: when it did
    finished: bool = False  # it said how the output ends
    lost: bool = False  # it gave the sequence up, or is gone
    timings: SequenceTimings | None = None


class Lost(Exception):
    """The attempt is over, but another one may succeed."""

    def __init__(self, error: TwostrokeError, *, workers: Iterable[int] = (), counted: bool = True) -> None:
        """`error`: what it would be without another attempt. `workers`: better avoided. `counted`: as a failure."""
        super().__init__(error.message)
        self.error = error
        self.workers = frozenset(workers)
        self.counted = counted


class Flight:
    """`launch` starts the parts; `take` gives the merged tokens of an `arrival`; `close` drops whatever still runs."""

    def __init__(
        self,
        key: SequenceKey,
        inbox: Inbox,
        max_tokens: int,
        *,
        first_index: int = 0,
        scores: PromptScores | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`first_index`: of the first token that is wanted; a replay goes on where the last attempt was. `scores`: no
        token comes out before they are complete."""
        self.key = key
        self.launched = False  # a part was sent, or it was tried
        self.route = ""  # why these workers
        self.on_transfer: Callable[[float], None] | None = None  # told once how long after token 0 the KV had arrived
        self._inbox = inbox
        self._first_index = first_index
        self._scores = scores or PromptScores(None)
        self._held: list[Token] = []
        self._merger = Merger(max_tokens, first_index)
        self._parts: dict[int, Part] = {}
        self._error: TwostrokeError | Lost | None = None
        self._closed = False
        self._clock = clock

    @property
    def finish(self) -> FinishReason | None:
        """Why the output ended, once `take` gave all of it."""
        return self._merger.finish if self._scores.complete else None

    def launch(self, part: Part, submit: pb.Submit) -> None:
        """Sends a part to its worker. Unavailable where its session is over."""
        self.launched = True
        part.session.submit(self.key, submit, self._inbox)
        part.session.load.charge(part.tokens, part.pages)
        self._parts[part.session.incarnation] = part

    def join(self, part: Part) -> None:
        """Another sample's part, launched just now, does this one's work too."""
        self.launched = True
        part.session.expect(self.key, self._inbox)
        part.session.load.charge(part.tokens, part.pages)
        self._parts[part.session.incarnation] = part

    def lose(self, error: TwostrokeError) -> None:
        """It is over; another attempt may succeed."""
        self._error = self._error or Lost(error)

    def arrival(self) -> asyncio.Future[None]:
        """Is done when there is something to take. Raises the failure that ended the attempt: Lost where another one
        may succeed."""
        if self._error is not None:
            raise self._error
        return self._inbox.arrival()

    def take(self) -> list[Token]:
        """The next tokens, in order, each once; may be empty. Raises as `arrival` does."""
        fresh, self._held = self._held, []
        for event in self._inbox.take():
            fresh += self._apply(event)
        if not self._scores.complete:
            fresh, self._held = [], fresh
        if fresh or self._error is None or self.finish is not None:
            return fresh
        raise self._error

    def close(self) -> None:
        """Cancels at once what still runs at the workers. Idempotent."""
        if self._closed:
            return
        self._closed = True
        # A decode worker that finished had the KV: the prefill worker is done too. Where the prefill worker's token 0
        # was the last one, both are told: the ticket may be on its way.
        decoded = any(part.decodes and part.finished for part in self._parts.values())
        for part in self._parts.values():
            if part.lost or decoded:
                part.session.forget(self.key)
            else:
                part.session.cancel(self.key)
            if not part.heard and part.prefills:
                part.session.load.prefilled(part.tokens)
            part.session.load.ended(part.pages)

    def report(self) -> WorkerReport:
        """What the workers measured so far. The decode worker repeats what the prefill worker measured, which may come
        late or not at all."""
        decoding = self._timings(decodes=True) or SequenceTimings()
        computing = self._timings(prefills=True) or decoding
        return WorkerReport(
            queue=computing.queue,
            prefill=computing.prefill,
            transfer=decoding.transfer,
            cached_tokens=computing.cached_tokens,
            prefill_worker=self._name(prefills=True),
            decode_worker=self._name(decodes=True),
            route=self.route,
        )

    def _timings(self, *, prefills: bool = False, decodes: bool = False) -> SequenceTimings | None:
        part = self._part(prefills=prefills, decodes=decodes)
        return part.timings if part is not None else None

    def _name(self, *, prefills: bool = False, decodes: bool = False) -> str:
        part = self._part(prefills=prefills, decodes=decodes)
        return part.session.name if part is not None else ""

    def _part(self, *, prefills: bool, decodes: bool) -> Part | None:
        return next(
            (p for p in self._parts.values() if (prefills and p.prefills) or (decodes and p.decodes)),
            None,
        )

    def _apply(self, event: Event) -> Sequence[Token]:
        part = self._parts.get(event.worker)
        if part is None:
            return ()
        match event:
            case Output():
                return self._told(part, event.output)
            case Failed():
                part.lost = True
                self._lost(part, self._failure(part, event))
            case Gone(reason=reason):
                part.lost = True
                if part.decodes or not self._scores.complete:
                    error = Unavailable(f"{part.session.name} is gone: {reason}", retry_after_s=RETRY_S)
                    self._lost(part, Lost(error, workers=(event.worker,)))
        return ()

    def _told(self, part: Part, output: SequenceOutput) -> Sequence[Token]:
        if not part.heard and output.prompt_logprobs is None:
            part.heard, part.heard_at = True, self._clock()
            if part.prefills:
                part.session.load.prefilled(part.tokens)
            elif output.timings is not None:
                self._transferred(part, output.timings.transfer)
        if output.timings is not None:
            part.timings = output.timings
        if output.finish is not None:
            part.finished = True
        if output.prompt_logprobs is not None:
            self._scores.add(output.prompt_logprobs)
        elif part.prefills and not self._scores.complete:  # they come before its first token
            fault = TwostrokeError(f"{part.session.name} did not tell the prompt's log-probabilities")
            self._lost(part, Lost(fault, workers=(part.session.incarnation,)))
        return self._merger.accept(output.first_index, output.tokens, output.finish)

    def _transferred(self, decode: Part, seconds: float) -> None:
        """The decode worker has the KV. `seconds`: since its ticket: what it waited for pages is no transfer."""
        prefill = self._part(prefills=True, decodes=False)
        told, self.on_transfer = self.on_transfer, None
        if told is not None and prefill is not None:
            told(min(seconds, decode.heard_at - prefill.heard_at) if prefill.heard else 0.0)

    def _lost(self, part: Part, error: TwostrokeError | Lost) -> None:
        """A prefill worker that fails after token 0 is out, or after the decode worker spoke, ends nothing: the decode
        worker knows whether it has the KV, and says so."""
        early = self._merger.next_index == self._first_index or not self._scores.complete
        if self._error is None and (part.decodes or early):
            self._error = error

    def _failure(self, part: Part, failed: Failed) -> TwostrokeError | Lost:
        code, text, worker = failed.code, f"{part.session.name}: {failed.message}", part.session.incarnation
        if code == pb.FAILURE_CODE_INVALID:
            return InvalidRequest(failed.message, field=request_field(failed.field))
        if code == pb.FAILURE_CODE_DEADLINE:
            return DeadlineExceeded(text)
        if code == pb.FAILURE_CODE_DRAINING:
            return Lost(Unavailable(text, retry_after_s=RETRY_S), workers=(worker,), counted=False)
        if code == pb.FAILURE_CODE_WRITER_LOST:  # the writer's fault, whether it lives or not
            writers = [incarnation for incarnation, other in self._parts.items() if other.prefills]
            return Lost(Unavailable(text, retry_after_s=RETRY_S), workers=writers)
        return Lost(TwostrokeError(text), workers=(worker,))
