"""The engine thread, with a scripted engine in the place of EngineCore."""

import asyncio
import logging
import math
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from twostroke.engine.load import Load
from twostroke.engine.request import (
    FinishReason,
    Request,
    SamplingParams,
    SequenceKey,
    SequenceOutput,
    StepResult,
    Token,
    Work,
)
from twostroke.engine.sequence import State
from twostroke.errors import DeadlineExceeded, InvalidRequest, TwostrokeError, Unavailable
from twostroke.services.handover.handover import NoHandover, PeerAddress
from twostroke.services.worker import driver as driver_module
from twostroke.services.worker.driver import Driver


def key(request: int) -> SequenceKey:
    return SequenceKey(7, request, 0, 0)


def request(number: int, work: Work = Work.ALL) -> Request:
    return Request(key(number), [1, 2, 3], SamplingParams(), work)


def output(number: int, token: int = 5, finish: FinishReason | None = None) -> SequenceOutput:
    return SequenceOutput(key(number), 0, [Token(token)], finish, None)


class ScriptedCore:
    """Answers each step with the next result of `steps`; has work while there is one or `busy` is set."""

    def __init__(self) -> None:
        self.steps: deque[StepResult | Exception] = deque()
        self.busy = False
        self.calls: list[tuple[Any, ...]] = []
        self.asked = 0
        self.expired: list[tuple[SequenceKey, Exception]] = []
        self.refusal: Exception | None = None
        self.broken: Exception | None = None
        self.count = 0
        self.held = 0
        self.states: dict[SequenceKey, State] = {}
        self.threads: set[int] = set()
        self.due_at = 0.0
        self.ahead = False
        self.published = 0
        self.on_step: Callable[[], None] = lambda: None

    def publish(self) -> None:
        self.published += 1

    def launches_only(self) -> bool:
        return self.ahead and bool(self.steps)

    def due(self) -> float:
        return self.due_at

    def on_ready(self, wake: Callable[[], None]) -> None:
        self.wake = wake

    def add(self, request: Request) -> None:
        self.calls.append(("add", request.key))
        if self.refusal:
            raise self.refusal

    def cancel(self, key: SequenceKey) -> bool:
        self.calls.append(("cancel", key))
        self.states.pop(key, None)
        return True

    def has_work(self) -> bool:
        self.asked += 1
        return self.busy or bool(self.steps)

    def step(self, hook: object = None, wait: object = None) -> StepResult:
        self.threads.add(threading.get_ident())
        self.count += 1
        if not self.steps:
            return StepResult()
        self.on_step()
        result = self.steps.popleft()
        if isinstance(result, Exception):
            raise result
        return result

    def expire(self, now: float) -> list[tuple[SequenceKey, Exception]]:
        expired, self.expired = self.expired, []
        return expired

    def carrier(self, key: SequenceKey) -> SequenceKey | None:
        return key

    def state_of(self, key: SequenceKey) -> State | None:
        return self.states.get(key)

    def load(self) -> Load:
        return Load(9, 10, self.held, 0, 0, 0, self.count)

    def check_integrity(self, *, idle: bool = False) -> None:
        self.calls.append(("check", idle))
        if self.broken:
            raise self.broken


class RecordingHandover(NoHandover):
    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.on_stepped: Callable[[], list[SequenceOutput]] = list
        self.refusal: Exception | None = None
        self.post: Any = None
        self.emit: Any = None
        self.awake_until = 0.0
        self.looked = 0
        self.found: Callable[[], None] | None = None

    def look(self) -> None:
        self.looked += 1
        found, self.found = self.found, None
        if found is not None:
            found()

    def attach(self, post: Any, emit: Any) -> None:
        self.post, self.emit = post, emit

    def submitted(self, request: Request, peer: PeerAddress | None) -> None:
        self.calls.append(("submitted", request.key, peer))
        if self.refusal:
            raise self.refusal

    def gone(self, key: SequenceKey) -> None:
        self.calls.append(("gone", key))

    def stepped(self, result: StepResult) -> list[SequenceOutput]:
        return self.on_stepped()

    def tick(self, now: float) -> None:
        self.calls.append(("tick",))


class Bench:
    """A driver, its scripted parts, and what came to the loop."""

    def __init__(self, **options: Any) -> None:
        self.core = ScriptedCore()
        self.handover = RecordingHandover()
        self.results: asyncio.Queue[StepResult] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        core: Any = self.core
        self.driver = Driver(core, self.handover, loop, self.results.put_nowait, **{"check_s": 0, **options})

    async def settled(self) -> None:
        """Returns when all that was posted has run and has been told."""
        for _ in range(3):
            await self.driver.call(lambda: None)

    @property
    def ticks(self) -> int:
        return self.handover.calls.count(("tick",))

    def seen(self) -> list[StepResult]:
        return [self.results.get_nowait() for _ in range(self.results.qsize())]


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    made = Bench()
    made.driver.start()
    yield made
    await made.driver.stop()


async def test_results_come_one_call_a_step_in_order(bench: Bench) -> None:
    results = [StepResult(outputs=[output(1, n), output(2, n)], progress=True) for n in range(50)]
    bench.driver.post(lambda: bench.core.steps.extend(results))
    got = [await bench.results.get() for _ in range(50)]
    assert [[o.tokens[0].token_id for o in result.outputs] for result in got] == [[n, n] for n in range(50)]
    assert len(bench.core.threads) == 1
    assert bench.core.threads != {threading.get_ident()}


async def test_pages_become_findable_when_there_is_nothing_else_to_do(bench: Bench) -> None:
    bench.driver.post(lambda: bench.core.steps.append(StepResult(outputs=[output(1)], progress=True)))
    seen: list[int] = []
    bench.core.on_step = lambda: seen.append(bench.core.published)
    assert [o.key for o in (await bench.results.get()).outputs] == [key(1)]
    await bench.settled()
    assert bench.core.published > seen[0]


async def test_while_something_is_near_it_looks_and_does_not_sleep(bench: Bench) -> None:
    await bench.settled()
    assert bench.handover.looked == 0
    bench.handover.awake_until = time.monotonic() + 60
    await bench.settled()
    ran = asyncio.Event()
    loop = asyncio.get_running_loop()
    bench.handover.found = lambda: bench.driver.post(lambda: loop.call_soon_threadsafe(ran.set))
    async with asyncio.timeout(10):
        await ran.wait()  # what it found was run without anybody else's help
    assert bench.handover.looked > 1
    bench.handover.awake_until = 0.0
    await bench.settled()
    looked = bench.handover.looked
    await asyncio.sleep(0.05)
    assert bench.handover.looked == looked


async def test_until_a_step_is_due_events_run_and_what_they_emit_is_told(bench: Bench) -> None:
    core, driver = bench.core, bench.driver
    core.due_at = math.inf
    driver.post(lambda: core.steps.append(StepResult(outputs=[output(1)], progress=True)))
    await bench.settled()
    assert core.count == 0
    await driver.call(lambda: driver.emit(StepResult(outputs=[output(2)])))
    assert [o.key for o in (await bench.results.get()).outputs] == [key(2)]
    ticks = bench.ticks
    await driver.call(lambda: setattr(driver, "_next_tick", 0.0))
    await driver.call(lambda: None)
    assert bench.ticks > ticks, "ticks go on"
    assert core.count == 0
    await driver.call(lambda: setattr(core, "due_at", 0.0))
    assert [o.key for o in (await bench.results.get()).outputs] == [key(1)]
    core.due_at = math.inf  # and it can be stopped meanwhile: by the fixture


async def test_steps_without_outputs_are_not_told(bench: Bench) -> None:
    bench.driver.post(lambda: bench.core.steps.extend(StepResult(progress=True) for _ in range(5)))
    await bench.settled()
    while bench.core.steps:
        await bench.settled()
    assert bench.seen() == []
    assert bench.driver.steps == bench.driver.load.steps == 5


async def test_an_idle_engine_sleeps(bench: Bench) -> None:
    await bench.settled()
    before, ticks = bench.core.asked, bench.ticks
    await asyncio.sleep(0.7)
    assert bench.core.asked - before <= 2 + bench.ticks - ticks
    assert bench.core.count == 0
    assert ("tick",) in bench.handover.calls


async def test_a_step_without_progress_waits_for_an_event(bench: Bench) -> None:
    def begin() -> None:
        bench.core.busy = True

    bench.driver.post(begin)
    await bench.settled()
    before, ticks = bench.core.count, bench.ticks
    await asyncio.sleep(0.2)
    assert bench.core.count - before <= 1 + bench.ticks - ticks  # a step follows each tick
    await bench.settled()
    assert bench.core.count > before


async def test_events_run_in_the_order_of_posting(bench: Bench) -> None:
    seen: list[int] = []
    for n in range(1000):
        bench.driver.post(lambda n=n: seen.append(n))  # type: ignore[misc]
    await bench.settled()
    assert seen == list(range(1000))


async def test_call_answers_and_raises(bench: Bench) -> None:
    assert await bench.driver.call(lambda: 3 + 4) == 7
    with pytest.raises(ZeroDivisionError):
        await bench.driver.call(lambda: 1 // 0)
    assert await bench.driver.call(lambda: "alive") == "alive"


async def test_a_cancelled_call_harms_nothing(bench: Bench) -> None:
    gate = threading.Event()
    bench.driver.post(lambda: gate.wait() and None)
    waiting = asyncio.create_task(bench.driver.call(lambda: 1))
    await asyncio.sleep(0)
    waiting.cancel()
    gate.set()
    assert await bench.driver.call(lambda: 2) == 2


async def test_an_event_that_raises_is_logged(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    bench.driver.post(lambda: [][0])
    await bench.settled()
    assert "an event failed" in caplog.text
    assert bench.driver.failure is None


async def test_a_step_that_raises_ends_the_thread(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    gate = threading.Event()
    bench.driver.post(lambda: gate.wait() and None)
    bench.driver.post(lambda: bench.core.steps.append(RuntimeError("out of registers")))
    caught = asyncio.create_task(bench.driver.call(lambda: 1))
    await asyncio.sleep(0)
    late = [asyncio.create_task(bench.driver.call(lambda: bench.core.threads)) for _ in range(3)]
    await asyncio.sleep(0)
    gate.set()
    async with asyncio.timeout(10):
        await bench.driver.ended.wait()
        done = await asyncio.gather(caught, *late, return_exceptions=True)
    assert len(done) == 4  # answered or refused, none left hanging
    assert isinstance(bench.driver.failure, RuntimeError)
    assert "out of registers" in caplog.text
    with pytest.raises(Unavailable):
        await bench.driver.call(lambda: 1)
    await bench.driver.stop()


async def test_a_runner_that_fails_every_step_ends_the_thread(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    failed = [StepResult(failures=[(key(n), RuntimeError("device lost"))], progress=True) for n in range(100)]
    bench.driver.post(lambda: bench.core.steps.extend(failed))
    async with asyncio.timeout(10):
        await bench.driver.ended.wait()
    assert "device lost" in str(bench.driver.failure)
    assert len(bench.core.steps) > 50
    assert caplog.text.count("a step failed") < 50


async def test_submit(bench: Bench) -> None:
    peer = PeerAddress("127.0.0.1:1", 99)
    bench.driver.submit(request(1, Work.PREFILL), peer)
    await bench.settled()
    assert bench.core.calls[0] == ("add", key(1))
    assert ("submitted", key(1), peer) in bench.handover.calls
    assert bench.seen() == []


@pytest.mark.parametrize(
    ("refusal", "kind"),
    [(InvalidRequest("too long", field="prompt_ids"), InvalidRequest), (KeyError("oops"), TwostrokeError)],
)
async def test_a_refused_submit_is_a_failure(bench: Bench, refusal: Exception, kind: type[Exception]) -> None:
    bench.core.refusal = refusal
    bench.driver.submit(request(1), None)
    result = await bench.results.get()
    assert [(k, type(error)) for k, error in result.failures] == [(key(1), kind)]
    assert not [call for call in bench.handover.calls if call[0] == "submitted"]


async def test_a_submit_that_the_handover_refuses_is_undone(bench: Bench) -> None:
    bench.handover.refusal = ValueError("no such peer")
    bench.driver.submit(request(1, Work.PREFILL), None)
    result = await bench.results.get()
    assert [k for k, _ in result.failures] == [key(1)]
    assert ("cancel", key(1)) in bench.core.calls
    assert ("gone", key(1)) in bench.handover.calls


async def test_drop_frees_in_the_engine_and_the_handover(bench: Bench) -> None:
    bench.driver.drop([key(1), key(2)])
    bench.driver.drop([])
    await bench.settled()
    assert [call for call in bench.core.calls if call[0] == "cancel"] == [("cancel", key(1)), ("cancel", key(2))]
    assert [call for call in bench.handover.calls if call[0] == "gone"] == [("gone", key(1)), ("gone", key(2))]
    assert bench.seen() == []


async def test_a_drop_that_fails_spares_the_others(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    def cancel(dropped: SequenceKey) -> bool:
        if dropped == key(1):
            raise KeyError(dropped)
        return True

    bench.core.cancel = cancel  # type: ignore[method-assign]
    bench.driver.drop([key(1), key(2)])
    await bench.settled()
    assert ("gone", key(2)) in bench.handover.calls
    assert "could not be dropped" in caplog.text


async def test_expired_sequences_are_failures_and_gone(bench: Bench) -> None:
    bench.core.expired = [(key(3), DeadlineExceeded("late"))]
    async with asyncio.timeout(10):
        result = await bench.results.get()
    assert result.failures[0][0] == key(3)
    assert ("gone", key(3)) in bench.handover.calls


async def test_finished_and_failed_sequences_are_gone_but_a_prefill_with_its_token_0_is_not(bench: Bench) -> None:
    bench.core.states[key(1)] = State.HELD
    bench.driver.submit(request(1, Work.PREFILL), None)
    finished = StepResult(
        outputs=[output(1, finish=FinishReason.STOP), output(2, finish=FinishReason.LENGTH), output(3)],
        failures=[(key(4), TwostrokeError("x"))],
        progress=True,
    )
    bench.driver.post(lambda: bench.core.steps.append(finished))
    await bench.results.get()
    gone = [call[1] for call in bench.handover.calls if call[0] == "gone"]
    assert sorted(gone) == [key(2), key(4)]
    bench.driver.drop([key(1)])
    await bench.settled()
    assert ("gone", key(1)) in bench.handover.calls


async def test_a_released_prefill_is_told_once(bench: Bench) -> None:
    released: list[list[SequenceKey]] = []
    told = asyncio.Event()

    def on_released(keys: list[SequenceKey]) -> None:
        released.append(keys)
        told.set()

    bench.driver._on_released = on_released
    bench.core.states = {key(n): State.HELD for n in range(3)}
    for n in range(3):
        bench.driver.submit(request(n, Work.PREFILL), None)
    bench.driver.submit(request(3), None)  # whole requests end with their last output
    await bench.settled()
    assert ("check", True) not in bench.core.calls  # held pages are no idleness
    bench.driver.drop([key(0)])
    last = StepResult(outputs=[output(2, finish=FinishReason.LENGTH)], progress=True)
    bench.driver.post(lambda: bench.core.steps.append(last))
    bench.driver.post(lambda: bench.core.states.clear())
    async with asyncio.timeout(10):
        await told.wait()
    assert [sorted(keys) for keys in released] == [[key(1), key(2)]]


async def test_what_events_emit_leaves_before_the_next_step(bench: Bench) -> None:
    def arrived() -> None:
        bench.handover.emit(StepResult(outputs=[output(1, 100)]))
        bench.core.steps.append(StepResult(outputs=[output(1, 101)], progress=True))

    bench.handover.post(arrived)
    first, second = await bench.results.get(), await bench.results.get()
    assert [o.tokens[0].token_id for o in (*first.outputs, *second.outputs)] == [100, 101]


async def test_it_leaves_behind_the_launch_of_a_step_that_waits_for_nothing(bench: Bench) -> None:
    left = list[bool]()

    def arrived() -> None:
        bench.handover.emit(StepResult(outputs=[output(1, 100)], failures=[(key(9), TwostrokeError("lost"))]))
        bench.core.steps.append(StepResult(progress=True))

    bench.core.ahead = True
    bench.core.on_step = lambda: left.append(not bench.driver._pending.outputs)
    bench.handover.post(arrived)
    result = await bench.results.get()
    assert ([o.tokens[0].token_id for o in result.outputs], [k for k, _ in result.failures]) == ([100], [key(9)])
    assert left == [False]
    bench.core.ahead = False
    bench.handover.post(arrived)
    result = await bench.results.get()
    assert [o.tokens[0].token_id for o in result.outputs] == [100]
    await bench.settled()
    assert left == [False, True]


async def test_without_a_step_it_leaves_at_once(bench: Bench) -> None:
    bench.core.ahead = True
    bench.handover.post(lambda: bench.handover.emit(StepResult(outputs=[output(1, 100)])))
    result = await bench.results.get()
    assert [o.tokens[0].token_id for o in result.outputs] == [100]


async def test_what_stepped_adds_follows_the_steps_outputs_in_the_same_call(bench: Bench) -> None:
    def stepped() -> list[SequenceOutput]:
        bench.handover.emit(StepResult(outputs=[output(3, 3)], failures=[(key(9), TwostrokeError("lost"))]))
        return [output(2, 2)]

    bench.handover.on_stepped = stepped
    bench.driver.post(lambda: bench.core.steps.append(StepResult(outputs=[output(1, 1)], progress=True)))
    result = await bench.results.get()
    assert [o.tokens[0].token_id for o in result.outputs] == [1, 2, 3]
    assert [k for k, _ in result.failures] == [key(9)]


async def test_the_idle_check_runs_once_work_is_over(bench: Bench) -> None:
    bench.driver.post(lambda: bench.core.steps.append(StepResult(outputs=[output(1)], progress=True)))
    await bench.settled()
    async with asyncio.timeout(10):
        while ("check", True) not in bench.core.calls or bench.driver._idle_check._touched is not None:
            await asyncio.sleep(0.01)  # to have settled is something that happened, too
    bench.core.calls.clear()
    await asyncio.sleep(0.6)
    assert ("check", True) not in bench.core.calls  # nothing has happened since


async def test_pages_in_transfer_put_the_idle_check_off(bench: Bench) -> None:
    bench.core.held = 3
    await bench.settled()
    assert ("check", True) not in bench.core.calls
    bench.core.held = 0
    await bench.settled()
    assert ("check", True) in bench.core.calls


@pytest.mark.parametrize("strict", [False, True])
async def test_wrong_books_are_logged_and_strictly_fatal(strict: bool, caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench(strict=strict)
    bench.core.broken = RuntimeError("page 3 is owned by nobody")
    bench.driver.start()
    bench.driver.post(lambda: None)
    if strict:
        await bench.driver.ended.wait()
        assert bench.driver.failure is bench.core.broken
    else:
        await bench.settled()
        assert bench.driver.failure is None
    await bench.driver.stop()
    assert "page 3 is owned by nobody" in caplog.text
    assert any(record.levelno >= logging.ERROR for record in caplog.records)


async def test_stop_is_idempotent_and_needs_no_start() -> None:
    idle = Bench()
    await idle.driver.stop()
    bench = Bench()
    bench.driver.start()
    await asyncio.gather(bench.driver.stop(), bench.driver.stop())
    await bench.driver.stop()
    assert bench.driver.ended.is_set()
    assert bench.driver.failure is None


async def test_stop_leaves_a_hung_step_behind(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(driver_module, "JOIN_S", 0.05)
    gate = threading.Event()
    bench = Bench()
    bench.driver.start()
    bench.driver.post(lambda: gate.wait() and None)
    await bench.driver.stop()
    assert "left behind" in caplog.text
    gate.set()
    await bench.driver.ended.wait()


def test_a_closed_loop_ends_the_thread() -> None:
    async def begin() -> Bench:
        bench = Bench()
        bench.driver.start()
        return bench

    loop = asyncio.new_event_loop()
    bench = loop.run_until_complete(begin())
    loop.close()
    bench.core.expired = [(key(1), DeadlineExceeded("late"))]
    bench.driver.post(lambda: None)
    bench.driver._thread.join(10)
    assert not bench.driver._thread.is_alive()


async def test_what_becomes_ready_elsewhere_wakes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that could do nothing is tried again: a grammar is compiled."""
    monkeypatch.setattr("twostroke.services.worker.driver.TICK_S", 600.0)  # which would wake it too
    bench = Bench()

    def begin() -> None:
        bench.core.busy = True

    bench.driver.post(begin)
    bench.driver.start()
    await bench.settled()
    before = bench.core.count
    threading.Thread(target=bench.core.wake).start()
    async with asyncio.timeout(20):
        while bench.core.count == before:
            await asyncio.sleep(0.005)
    await bench.driver.stop()
