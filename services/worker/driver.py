"""The engine thread: the one owner of EngineCore and of the hand-over machine."""

import asyncio
import contextlib
import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from ...engine.core import EngineCore, Load
from ...engine.request import Request, SequenceKey, StepResult, Work, sample_keys
from ...errors import InvalidRequest, TwostrokeError
from ..handover.handover import Handover, PeerAddress
from .calls import Calls
from .idle_check import CHECK_S, IdleCheck
from .step_faults import StepFaults

log = logging.getLogger(__name__)

T = TypeVar("T")
TICK_S = 0.5  # deadlines, repeats of the ticket protocol; an idle engine that expects nothing wakes up no more often
LOAD_S = 0.1  # the load is counted no more often than this while steps run
JOIN_S = 10.0  # a step that takes longer than this at the end is left behind


class Driver:
    """Runs events and steps, one after another, on a thread of its own; results leave in one call a step.

    The queue of events is not bounded here because its sources are: a session's live sequences, a link's tickets. An
    event that raises is logged (or answers its `call`) and the thread goes on. A step, a tick or, with `strict`, the
    idle check that raises has left the engine in an unknown state: the thread ends, `failure` says why, `ended` is set,
    and the process is expected to exit (its supervisor starts it anew).
    """

    def __init__(
        self,
        core: EngineCore,
        handover: Handover,
        loop: asyncio.AbstractEventLoop,
        on_result: Callable[[StepResult], None],
        *,
        on_released: Callable[[list[SequenceKey]], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
        check_s: float = CHECK_S,
        strict: bool = False,
    ) -> None:
        """`on_result` and `on_released` run on `loop`; the latter, within a tick, for PREFILL sequences that the engine
        let go because their pages are no longer needed. `clock`: monotonic seconds. `strict`: a failed idle check ends
        the thread.
        """
        self.core = core
        self.handover = handover
        self.ended = asyncio.Event()  # the loop's
        self.failure: BaseException | None = None  # final once `ended` is set
        self.steps = 0  # like `load` and `turns` for any thread to read
        self.turns = 0  # rounds of the thread, at least one each `TICK_S`: stands still when a step or an event hangs
        self.load: Load = core.load()
        self._loop = loop
        self._on_result = on_result
        self._on_released = on_released
        self._clock = clock
        self._events: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._stopping = self._abandoned = False
        self._calls = Calls(loop, self.post, self._on_loop)
        self._pending = StepResult()  # what events brought about; the engine thread's, like all below
        self._prefills: dict[SequenceKey, int] = {}  # samples of PREFILL sequences, which outlive their tokens
        self._next_tick = 0.0
        self._next_load = 0.0
        self._faults = StepFaults()
        self._idle_check = IdleCheck(core, handover, clock, check_s=check_s, strict=strict)
        handover.attach(self.post, self.emit)
        core.on_ready(lambda: self.post(lambda: None))  # wakes it

    # Any thread

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def post(self, event: Callable[[], None]) -> None:
        """Runs `event` on the engine thread between steps, in order of posting; wakes the thread if it is idle."""
        self._events.put(event)

    def submit(self, request: Request, peer: PeerAddress | None) -> None:
        """Adds a sequence; one that the engine refuses comes back as a failure in a result."""
        self.post(lambda: self._submit(request, peer))

    def drop(self, keys: Iterable[SequenceKey]) -> None:
        """Gives samples up at once, whatever they are doing; nothing comes back. Unknown ones are ignored."""
        dropped = tuple(keys)
        if dropped:
            self.post(lambda: self._drop(dropped))

    # The loop

    async def call(self, fn: Callable[[], T]) -> T:
        """Runs `fn` on the engine thread between steps. Raises what it raises; Unavailable once the thread ended."""
        return await self._calls.call(fn)

    async def stop(self) -> None:
        """Ends the thread after its current step. Idempotent; a thread that failed or never started is no error."""
        self._stopping = True
        if self._abandoned or not self._thread.is_alive():
            return
        self.post(lambda: None)  # wakes it
        try:
            async with asyncio.timeout(JOIN_S):
                await self.ended.wait()
        except TimeoutError:
            log.error("the engine's thread did not end within %g s; it is left behind", JOIN_S)
            return
        self._thread.join()

    def abandon(self, error: TwostrokeError) -> None:
        """The thread hangs: from now on it counts as failed, whatever becomes of it."""
        log.critical("the engine's thread is left behind: %s", error.message)
        self._abandoned = self._stopping = True
        self.failure = error
        self._end()

    def _end(self) -> None:
        self.ended.set()
        self._calls.end()

    # The engine thread

    def emit(self, result: StepResult) -> None:
        """Takes outputs and failures that no step brought about to the sessions, before those of the next step."""
        self._pending.outputs.extend(result.outputs)
        self._pending.failures.extend(result.failures)

    def _run(self) -> None:
        try:
            self._turn()
        except BaseException as error:
            log.critical("the engine failed: %r", error, exc_info=error)
            self.failure = error
        self._on_loop(self._end)

    def _turn(self) -> None:
        self._next_tick = self._clock() + TICK_S
        blocked = True  # until something happens, a step could do nothing
        while not self._stopping:
            self.turns += 1
            if self._run_events(wait=blocked, until=self.core.due()):
                blocked = False
            now = self._clock()
            if now >= self._next_tick:
                self._tick(now)
                blocked = False
            if blocked or self._stopping or not self.core.launches_only():
                self._flush()  # else behind the launch, which the loop at work would hold up
            if self._stopping:
                return
            if self.core.due() > self._clock():  # an event or a tick came first
                continue
            blocked = blocked or not self.core.has_work() or not self._step()
            if blocked or now >= self._next_load:
                self.load = self.core.load()
                self._next_load = now + LOAD_S
            if blocked:
                self.core.publish()
                self._check_when_idle()

    def _run_events(self, *, wait: bool, until: float) -> bool:
        """Runs the events that are there now. With `wait` it blocks for the first one until the next tick is due; where
        `until` is ahead, until then at most.
        """
        if until > self._clock():
            wait = True
        else:
            until = math.inf
        happened = False
        for _ in range(max(1, self._events.qsize())):  # those that come meanwhile must not keep steps waiting
            try:
                first = wait and not happened
                event = self._wait(min(self._next_tick, until)) if first else self._events.get_nowait()
            except queue.Empty:
                break
            happened = True
            try:
                event()
            except Exception:
                log.exception("an event failed on the engine's thread")
        if happened:
            self._idle_check.touch()
        return happened

    def _wait(self, until: float) -> Callable[[], None]:
        """The next event; queue.Empty where none comes until then."""
        while self._clock() < min(self.handover.awake_until, until):
            self.handover.look()
            with contextlib.suppress(queue.Empty):
                return self._events.get_nowait()
            time.sleep(0)  # lets other threads have the interpreter
        return self._events.get(timeout=max(0.0, until - self._clock()))

    def _step(self) -> bool:
        """One step. False: it could do nothing, and could not until something happens."""
        result = self.core.step(self.handover.hook, self.handover.wait)
        self._faults.note(result)
        self.steps += 1
        self._idle_check.touch()
        result.outputs.extend(self.handover.stepped(result))
        for key, _ in result.failures:
            self._forget(key)
        for output in result.outputs:
            if output.finish is not None and self.core.state_of(output.key) is None:  # a PREFILL one may be held
                self.handover.gone(output.key)
        happened = bool(self._pending.outputs or self._pending.failures)
        self._pending.outputs[:0] = result.outputs
        self._pending.failures[:0] = result.failures
        self._flush()
        return result.progress or happened

    def _tick(self, now: float) -> None:
        self._next_tick = now + TICK_S
        expired = self.core.expire(now)
        for key, _ in expired:
            self._forget(key)
        self._pending.failures.extend(expired)
        if expired:
            self._idle_check.touch()
        self.handover.tick(now)
        released = [key for key in self._prefills if self.core.state_of(key) is None]
        if released:
            samples = [sample for key in released for sample in sample_keys(key, self._prefills.pop(key))]
            self._on_loop(self._on_released, samples)

    def _flush(self) -> None:
        """One call to the loop for all that is pending, so that no token costs a wake-up of its own."""
        pending = self._pending
        if pending.outputs or pending.failures:
            self._pending = StepResult()
            pending.step = self.steps
            self._on_loop(self._on_result, pending)

    def _submit(self, request: Request, peer: PeerAddress | None) -> None:
        key = request.key
        samples = sample_keys(key, request.samples)
        try:
            self.core.add(request)
        except InvalidRequest as error:
            self._pending.failures += [(sample, error) for sample in samples]
            return
        except Exception as error:
            log.exception("the engine could not take a sequence")
            failure = TwostrokeError(f"the engine could not take it: {error}")
            self._pending.failures += [(sample, failure) for sample in samples]
            return
        if request.work is Work.PREFILL:
            self._prefills[key] = request.samples
        try:
            self.handover.submitted(request, peer)
        except Exception as error:
            log.exception("the hand-over could not take a sequence")
            self._drop(samples)
            failure = TwostrokeError(f"the hand-over could not take it: {error}")
            self._pending.failures += [(sample, failure) for sample in samples]

    def _drop(self, keys: Iterable[SequenceKey]) -> None:
        """A sequence that carries other samples too goes on for these."""
        for key in keys:
            try:
                carrier = self.core.carrier(key) or key
                self.core.cancel(key)
                for ended in {key, carrier}:
                    if self.core.state_of(ended) is None:
                        self._forget(ended)
            except Exception:  # a fault of ours; the others must not stay because of it
                log.exception("a sequence could not be dropped")

    def _forget(self, key: SequenceKey) -> None:
        self._prefills.pop(key, None)
        self.handover.gone(key)

    def _check_when_idle(self) -> None:
        load = self.load
        if not (load.running or load.waiting or load.held_pages or self._prefills):
            self._idle_check.run_if_due()

    def _on_loop(self, callback: Callable[..., None], *arguments: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(callback, *arguments)
        except RuntimeError:  # the loop is closed: nobody is left to tell
            self._stopping = True
