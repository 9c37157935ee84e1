"""The engine's control: takes requests, decides steps, has them run, and hands out tokens."""

import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from ..errors import DeadlineExceeded, InvalidRequest, TwostrokeError
from .batch import Failed, Launched, LayerHook, Runner, StepWait
from .block_pool import BlockPool
from .config import EngineOptions
from .grammars import Grammars
from .integrity import check_integrity
from .load import Load
from .page_waste import PageUse
from .postprocess import Flight, Postprocessor
from .prefix_cache import root_digest
from .request import FinishReason, Request, SequenceKey, SequenceOutput, SequenceTimings, StepResult, Token, sample_keys
from .roster import Roster
from .scheduler import Schedule, Scheduler
from .sequence import Sequence, State
from .step_meter import StepMeter
from .validate import check_request, token_limit

__all__ = ["EngineCore", "Load", "Runner"]


class EngineCore:
    """One worker's sequences. One thread owns it; no method blocks except `step`."""

    def __init__(
        self,
        runner: Runner,
        options: EngineOptions,
        *,
        pages: int,
        context_length: int,
        vocab_size: int,
        eos_token_ids: frozenset[int],
        cache_root: bytes,
        grammars: Grammars | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`pages`: of the pool, page 0 counted in. `cache_root`: fingerprint of model and KV format. `grammars`: None
        takes no request whose output is constrained.
        """
        self.pool = BlockPool(pages)
        self._runner = runner
        self._options = options
        self._context_length = context_length
        self._vocab_size = vocab_size
        self._cache_root = cache_root
        self._eos = eos_token_ids
        self._grammars = grammars or Grammars("this engine has no tokenizer", vocab_size, eos_token_ids)
        self._clock = clock
        self._roster = Roster(self.pool, page_size=options.page_size, caching=options.prefix_cache)
        self._scheduler = Scheduler(self._roster, options)
        self._postprocessor = Postprocessor(self._roster, runner, self._scheduler.admission.output_length, clock=clock)
        self._flight: Flight | None = None  # the step on its way
        self._page_use = PageUse(options.page_size)
        self._meter = StepMeter()
        self._added = 0
        self._steps = 0
        self._preemptions = 0
        self._next_deadline = float("inf")  # none is earlier

    def add(self, request: Request) -> None:
        """Queues a request. Raises InvalidRequest, with the field, if it is malformed or can never fit."""
        for key in sample_keys(request.key, request.samples):
            if self.state_of(key) is not None:
                raise InvalidRequest(f"{key} is running already", field="key")
        context = self._context_length
        check_request(
            request,
            self._options,
            context_length=context,
            vocab_size=self._vocab_size,
            usable_pages=self.pool.usable,
        )
        tokens, params = [*request.prompt_ids, *request.output_ids], request.params
        free = params.ignore_eos and params.constraint is None  # where a constraint allows an end, it is one
        sequence = Sequence(
            request=request,
            arrival=request.arrival or self._clock(),
            order=self._added,
            limit=token_limit(request, context),
            root=root_digest(self._cache_root, request.cache_salt),
            tokens=tokens,
            base=len(tokens),
            samples=request.samples,
            siblings={key: [] for key in sample_keys(request.key, request.samples)[1:]},
            ends=frozenset(params.stop_token_ids) | (frozenset() if free else self._eos),
            matching=self._grammars.matching(params, tokens, len(request.prompt_ids)),
        )
        self._added += request.samples
        self._roster.add(sequence)
        if request.deadline is not None:
            self._next_deadline = min(self._next_deadline, request.deadline)

    def cancel(self, key: SequenceKey) -> bool:
        """Drops a sample in any state; what it owns is free at once (what a ticket holds, after `unhold`).

        What it shares with samples of the same prompt goes on for these. False when it is unknown.
        """
        sequence = self._carrier(key)
        if sequence is None or key not in sequence.carried():
            return False
        self._roster.disown(sequence, key)
        return True

    def abandon(self, key: SequenceKey) -> list[SequenceKey]:
        """Drops the sequence of that name with all samples that it carries still; returns these."""
        sequence = self._roster.live.get(key)
        return [] if sequence is None else self._roster.drop(sequence)

    def _carrier(self, key: SequenceKey) -> Sequence | None:
        return self._roster.live.get(key) or self._roster.siblings.get(key)

    def carrier(self, key: SequenceKey) -> SequenceKey | None:
        """Name of the sequence that computes this sample: until its prompt is done, the first sample's."""
        sequence = self._carrier(key)
        return None if sequence is None else sequence.key

    def expire(self, now: float) -> list[tuple[SequenceKey, Exception]]:
        """Drops the sequences whose deadline is not after `now`, whatever their state."""
        if now < self._next_deadline:
            return []
        timed = [(s.request.deadline, s) for s in self._roster.live.values() if s.request.deadline is not None]
        late = [sequence for deadline, sequence in timed if deadline <= now]
        self._next_deadline = min((deadline for deadline, _ in timed if deadline > now), default=float("inf"))
        dropped = [key for sequence in late for key in self._roster.drop(sequence)]
        return [(key, DeadlineExceeded("the deadline passed")) for key in dropped]

    def ticketed(self, key: SequenceKey) -> None:
        """PREFILL: its ticket came. It may start, and its pages cannot be taken from it any more."""
        sequence = self._roster.live.get(key)
        if sequence is not None and sequence.prefill_only:
            self._roster.ticketed(sequence)

    def release(self, key: SequenceKey) -> None:
        """PREFILL: nobody will fetch its pages (any more). Before token 0 was handed out, it ends with that."""
        sequence = self._roster.live.get(key)
        if sequence is None or not sequence.prefill_only:
            return
        sequence.released = True
        if sequence.reported:
            self._roster.drop(sequence)

    def kv_arrived(self, key: SequenceKey, first: Token, finish: FinishReason | None) -> SequenceOutput | None:
        """`samples_arrived` for a single sample: the output that repeats token 0, or None."""
        outputs = self.samples_arrived(key, {key: (first, finish)})
        return outputs[0] if outputs else None

    def samples_arrived(
        self,
        key: SequenceKey,
        firsts: Mapping[SequenceKey, tuple[Token, FinishReason | None]],
        measured: SequenceTimings | None = None,
    ) -> list[SequenceOutput]:
        """DECODE: the KV of that sequence is whole and verified. Its samples join the batch, or end with token 0.

        `measured`: by the prefill worker; from now on told as the sequence's own.

        Returns the outputs that repeat token 0; none if the sequence is not waiting for KV (any more). Raises, and
        changes nothing, where a token is missing or not the model's (InvalidRequest) or where pages cannot be copied.
        """
        sequence = self._roster.awaiting.get(key)
        if sequence is None:
            return []
        for sample in sequence.carried():
            if sample not in firsts:
                raise InvalidRequest("the prefill worker sent no token 0", field="first")
            if not 0 <= firsts[sample][0].token_id < self._vocab_size:
                raise InvalidRequest(f"token 0 must be in 0 .. {self._vocab_size - 1}", field="first")
        return self._postprocessor.arrive(sequence, firsts, measured)

    def on_ready(self, wake: Callable[[], None]) -> None:
        """`wake` is called, on other threads, when something that no method brings about lets a step go on: a grammar
        is compiled. Without it a step that can do nothing else waits a moment for that.
        """
        self._grammars.wake = wake

    def has_work(self) -> bool:
        """Whether a step might do something: False only if nothing can, until something changes from outside.

        True does not promise it: a step without `progress` is not worth repeating before the next outside change
        (any other method of this class, or of `pool`; or what `on_ready` tells of).
        """
        return bool(self._roster.running) or len(self._roster.waiting) > 0 or self._flight is not None

    def launches_only(self) -> bool:
        """Whether there is work, and `step` would launch it and come back: it would wait for nothing on its way."""
        ahead = self._runner.overlaps and self._flight is None and not self._roster.constrained
        return ahead and self.has_work()

    def due(self) -> float:
        """When to call `step`, by the clock; 0: now. Later where KV is awaited: a sequence whose KV arrives while
        a step is on its way can be in the next one if that is not launched yet.
        """
        flight = self._flight
        if flight is None or not self._roster.awaiting or flight.plan.prompt_tokens:
            return 0.0
        return self._meter.due(flight.began)

    def step(self, hook: LayerHook | None = None, wait: StepWait | None = None) -> StepResult:
        """Decides and launches one step. `hook` is called only in steps with PREFILL rows, `wait` before each wait.

        With a runner that overlaps, what is launched is computed while the host takes in the step before it, whose
        result this is; otherwise it is the launched one's own. If the runner raises, every sequence of that step fails
        with its exception, their pages are given back (their new content was never findable), and the engine goes on
        with the others.
        """
        self._steps += 1
        result = StepResult()
        before = self._flight
        result.progress = before is not None
        if before is not None and before.plan.decisive:
            self._take_in(before, result, wait)
            before = self._flight = None
        if len(self._roster.waiting):  # they may want the pages
            self._roster.publish_all()
        plan = self._scheduler.schedule(self._clock())
        result.reserved, result.preempted = plan.reserved, plan.preempted
        self._preemptions += len(plan.preempted)
        result.progress |= bool(plan.rows or plan.reserved or plan.preempted)
        flight = self._launch(plan, hook) if plan.rows else None
        self._roster.publish_all()
        if before is not None:
            self._take_in(before, result, wait)
        if flight is not None and plan.constrained:
            flight = self._draw(flight)
        if self._roster.constrained and not result.progress:
            result.progress = self._grammars.wait()
        self._flight = flight
        if flight is not None and (flight.failed or not self._runner.overlaps):
            self._take_in(flight, result, None)
            self._flight = None
        self._page_use.look(self._roster.admitted())
        return result

    def _launch(self, plan: Schedule, hook: LayerHook | None) -> Flight:
        wants_hook = any(row.progress is not None for row in plan.rows)
        self.pool.launched()
        began = self._clock()
        step: Launched
        try:
            step = self._runner.launch(plan.rows, hook if wants_hook else None)
        except Exception as error:
            step = Failed(error)
        return self._postprocessor.launched(plan, step, began)

    def _draw(self, flight: Flight) -> Flight:
        """Now that all tokens before are seen: what constraints allow next is made while the device is busy."""
        try:
            flight.step.draw()
        except Exception as error:
            return replace(flight, step=Failed(error))
        return flight

    def _take_in(self, flight: Flight, result: StepResult, wait: StepWait | None) -> None:
        """Waits for a launched step."""
        if wait is not None:
            wait(flight.step)
        try:
            tokens = flight.step.tokens()
            if len(tokens) != flight.plan.draws:
                raise TwostrokeError(f"the runner returned {len(tokens)} tokens for {flight.plan.draws} draws")
        except Exception as error:
            self.pool.completed()
            self._postprocessor.fail(flight.current(), error, result)
        else:
            self.pool.completed()
            self._meter.note(flight.began, self._clock(), flight.plan.prompt_tokens, flight.plan.decoding)
            self._postprocessor.advance(flight, tokens, result)

    def publish(self) -> None:
        """Lets prompts that come find the pages that were computed, or that arrived, of late, for some microseconds a
        page. For when there is nothing else to do: steps do it too.
        """
        self._roster.publish_all()

    def load(self) -> Load:
        """How busy this engine is."""
        roster = self._roster
        prompts = sum(sequence.remaining for sequence in roster.running.values() if not sequence.decoding)
        return Load(
            free_pages=self.pool.free_pages,
            pages=self.pool.usable,
            held_pages=self.pool.held_pages,
            running=roster.in_batch(),
            waiting=roster.waiting.total(),
            waiting_tokens=roster.waiting.prompt_tokens + prompts,
            steps=self._steps,
            prefilled_tokens=self._postprocessor.prefilled_tokens,
            covered_positions=self._page_use.covered,
            unused_positions=self._page_use.unused,
            mean_length=self._page_use.mean_length,
            prefill_s=self._meter.prompt_seconds,
            decode_step_s=self._meter.decode_step,
            preemptions=self._preemptions,
        )

    def state_of(self, key: SequenceKey) -> State | None:
        """Where a sequence stands; None when it is unknown."""
        sequence = self._carrier(key)
        return None if sequence is None else sequence.state

    def check_integrity(self, *, idle: bool = False) -> None:
        """Raises IntegrityError, naming every violation, unless all records agree. `idle`: nothing may be left."""
        check_integrity(self._roster, idle=idle)
