"""Sessions over a real gRPC server on loopback, a real EngineCore on a stand-in model, and a scripted gateway."""

import asyncio
import importlib.util
import random
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from twostroke.engine.batch import LayerHook, Row
from twostroke.engine.config import EngineOptions
from twostroke.engine.core import EngineCore
from twostroke.engine.request import FinishReason, SequenceKey, StepResult, Token, Work
from twostroke.engine.sequence import State
from twostroke.errors import Unavailable
from twostroke.services.grpc_setup import bind, create_server
from twostroke.services.handover.handover import NoHandover, PeerAddress
from twostroke.services.identity import PROTOCOL, draw_identity
from twostroke.services.interceptor import ErrorInterceptor
from twostroke.services.worker import sessions as sessions_module
from twostroke.services.worker.driver import Driver
from twostroke.services.worker.sessions import Sessions
from twostroke.services.worker.worker_servicer import WorkerServicer
from twostroke.v1 import worker_pb2 as pb
from twostroke.v1 import worker_pb2_grpc

VOCABULARY = 1000
PAGE = 16
PEER = pb.Peer(address="127.0.0.1:1", incarnation=99)  # as the scripted gateway names it


def load(path: str) -> Any:
    """A helper module, by its path below `tests`."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, Path(__file__).parent.parent.parent / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


fake_runner = load("engine/fake_runner.py")
Gateway = load("services/scripted_gateway.py").Gateway


class GatedRunner(fake_runner.FakeRunner):  # type: ignore[misc]
    """Steps wait while the gate is shut."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.gate = threading.Event()
        self.gate.set()
        self.logprobs = 0
        self.pace_s = 0.0  # a step's time

    def run(self, rows: list[Row], hook: LayerHook | None) -> list[Token]:
        self.gate.wait()
        time.sleep(self.pace_s)
        tokens: list[Token] = super().run(rows, hook)
        return [Token(token.token_id, ((token.token_id, -1.0),) * self.logprobs) for token in tokens]


class Worker:
    """A worker without its process."""

    def __init__(self, role: str = "both", *, pages: int = 200, buffer_bytes: int = 1 << 20, **options: Any) -> None:
        self.runner = GatedRunner(pages, PAGE, VOCABULARY)
        self.core = EngineCore(
            self.runner,
            EngineOptions(**{"token_budget": 64, "max_batch": 16, **options}),
            pages=pages,
            context_length=1 << 16,
            vocab_size=VOCABULARY,
            eos_token_ids=frozenset(),
            cache_root=b"test",
        )
        self.peers: list[list[PeerAddress]] = []
        self.sessions = Sessions(role, buffer_bytes=buffer_bytes, silence_s=10, on_peers=self.peers.append)
        self.driver = Driver(
            self.core,
            NoHandover(),
            asyncio.get_running_loop(),
            self.sessions.on_result,
            on_released=self.sessions.on_released,
            check_s=0,
            strict=True,
        )
        self.servicer = WorkerServicer()
        self.identity = draw_identity("worker-under-test", "here")
        self.address = ""

    def open(self) -> None:
        self.sessions.attach(self.driver)
        hello = pb.WorkerHello(identity=self.identity.message(), format=pb.ModelFormat(model="tiny"), pages=199)
        self.servicer.open(hello, self.sessions, None)

    async def call(self, fn: Callable[[], Any]) -> Any:
        async with asyncio.timeout(20):
            return await self.driver.call(fn)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Asks again and again on the engine's thread."""
        async with asyncio.timeout(20):
            while not await self.driver.call(condition):
                await asyncio.sleep(0.005)

    async def sessions_have(self, count: int) -> None:
        """Waits until so many samples are here."""
        async with asyncio.timeout(20):
            while self.sessions.live != count:
                await asyncio.sleep(0.005)

    async def empty(self) -> None:
        """Nothing may be left: on the loop, in the engine, in the pool."""
        self.runner.gate.set()
        await self.until(lambda: self.core.load().free_pages == self.core.pool.usable)
        await self.call(lambda: self.core.check_integrity(idle=True))
        async with asyncio.timeout(20):
            while self.sessions.live:
                await asyncio.sleep(0.01)


@asynccontextmanager
async def serving(role: str = "both", *, opened: bool = True, **options: Any) -> AsyncIterator[Worker]:
    worker = Worker(role, **options)
    server = create_server([ErrorInterceptor()])
    worker_pb2_grpc.add_WorkerServicer_to_server(worker.servicer, server)
    worker.address = bind(server, "127.0.0.1:0")
    await server.start()
    worker.driver.start()
    beats = None
    if opened:
        worker.open()
        beats = asyncio.create_task(worker.sessions.run())
    try:
        yield worker
        assert worker.driver.failure is None
    finally:
        worker.runner.gate.set()
        if beats is not None:
            beats.cancel()
        worker.sessions.end_all(Unavailable("the test is over"))
        await server.stop(0.2)
        await worker.driver.stop()
    assert worker.driver.failure is None
    left = [task for task in asyncio.all_tasks() if "worker_servicer" in str(task.get_coro())]
    assert left == []


def prompt_of(number: int, length: int) -> list[int]:
    return random.Random(number).choices(range(VOCABULARY), k=length)


def expected(prompt: list[int], count: int, sample: int = 0) -> list[int]:
    tokens: list[int] = fake_runner.expected_tokens(prompt, count, VOCABULARY, sample=sample)
    return tokens


async def test_tokens_stream_one_message_a_step() -> None:
    async with serving() as worker, Gateway(worker.address) as gateway:
        assert gateway.worker_hello is not None
        assert gateway.worker_hello.identity.incarnation == worker.identity.incarnation
        worker.runner.gate.clear()
        prompts = {n: prompt_of(n, 3 + 7 * n) for n in range(10)}
        for n, prompt in prompts.items():
            await gateway.submit(n, prompt, 20 + n)
        worker.runner.gate.set()
        await gateway.finished(*prompts)
        assert gateway.tokens == {n: expected(prompt, 20 + n) for n, prompt in prompts.items()}
        assert set(gateway.finishes.values()) == {FinishReason.LENGTH}
        numbers = [step.step for step in gateway.steps]
        assert numbers == sorted(set(numbers))
        assert max(len(step.requests) for step in gateway.steps) > 5  # packed
        with_timings = {n for step in gateway.steps for t in step.timings for n in [step.requests[t.sequence]]}
        assert with_timings == set(prompts)
        await worker.empty()


async def test_statuses_count_and_tell_the_load() -> None:
    async with serving() as worker, Gateway(worker.address) as gateway:
        worker.runner.gate.clear()
        await gateway.submit(1, prompt_of(1, 40), 5)
        await gateway.until(lambda: gateway.statuses)
        worker.sessions.beat()
        await gateway.until(lambda: len(gateway.statuses) > 1)
        assert [s.sequence for s in gateway.statuses] == sorted({s.sequence for s in gateway.statuses})
        worker.runner.gate.set()
        await gateway.finished(1)
        await worker.empty()
        await worker.call(lambda: None)
        worker.sessions.beat()
        await gateway.until(lambda: gateway.statuses[-1].steps >= 5)
        assert gateway.statuses[-1].pages == gateway.statuses[-1].free_pages == worker.core.pool.usable
        assert gateway.statuses[-1].running == gateway.statuses[-1].waiting == 0


@pytest.mark.parametrize(
    ("options", "code", "texts"),
    [
        ({"model": "llama"}, grpc.StatusCode.FAILED_PRECONDITION, ["tiny", "llama"]),
        ({"protocol": 7}, grpc.StatusCode.FAILED_PRECONDITION, [str(PROTOCOL), "7"]),
    ],
)
async def test_gateways_that_do_not_fit_are_refused(options: Any, code: grpc.StatusCode, texts: list[str]) -> None:
    async with serving() as worker:
        got, details = await Gateway(worker.address, **options).refusal()
        assert got is code
        assert all(text in details for text in texts)


async def test_no_session_before_the_worker_is_ready_or_while_it_drains() -> None:
    async with serving(opened=False) as worker:
        assert (await Gateway(worker.address).refusal())[0] is grpc.StatusCode.UNAVAILABLE
        worker.open()
        async with Gateway(worker.address, model=""):
            pass
        await worker.sessions.drain(0.1)
        code, details = await Gateway(worker.address).refusal()
        assert code is grpc.StatusCode.UNAVAILABLE
        assert "draining" in details


async def test_a_session_begins_with_one_hello() -> None:
    async with serving() as worker:
        gateway = Gateway(worker.address)
        await gateway.call.write(pb.ToWorker(heartbeat=pb.Heartbeat(sequence=1)))
        assert (await gateway.status())[0] is grpc.StatusCode.INVALID_ARGUMENT
        gateway = Gateway(worker.address)
        await gateway.call.done_writing()
        assert (await gateway.status())[0] is grpc.StatusCode.INVALID_ARGUMENT
        gateway = await Gateway(worker.address).__aenter__()
        await gateway.call.write(gateway.hello)
        assert (await gateway.status())[0] is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_decode_gateway_gets_links_opened() -> None:
    async with serving("decode") as worker, Gateway(worker.address) as gateway:
        await gateway.call.write(pb.ToWorker(peers=pb.Peers(peers=[PEER, pb.Peer(address="nobody")])))
        await gateway.submit(1, prompt_of(1, 5), 2)
        await gateway.finished(1)
        assert worker.peers == [[PeerAddress("127.0.0.1:1", 99)]]


@pytest.mark.parametrize(
    ("role", "works"),
    [
        ("both", {Work.ALL}),
        ("prefill", {Work.ALL, Work.PREFILL}),
        ("decode", {Work.ALL, Work.DECODE}),
    ],
)
async def test_each_role_refuses_what_it_does_not_do(role: str, works: set[Work]) -> None:
    async with serving(role) as worker, Gateway(worker.address) as gateway:
        for work in Work:
            await gateway.submit(int(work), prompt_of(1, 20), 2, work)
        refused = {int(work) for work in set(Work) - works}
        await gateway.until(lambda: refused <= set(gateway.failures) and 1 in gateway.finishes)
        assert set(gateway.failures) == refused
        assert {f.code for f in gateway.failures.values()} <= {pb.FAILURE_CODE_INVALID}
        assert all(role in failure.message for failure in gateway.failures.values())
        await gateway.cancel(2, 3)
        await worker.empty()


async def test_bad_submits_fail_alone() -> None:
    params = pb.SamplingParams(temperature=0, top_p=1, max_tokens=4)
    bad = {
        1: pb.Submit(work=pb.WORK_ALL, params=params),  # no prompt
        2: pb.Submit(work=pb.WORK_ALL, prompt_ids=[1]),  # no params
        3: pb.Submit(prompt_ids=[1], params=params),  # no work
        4: pb.Submit(work=pb.WORK_ALL, prompt_ids=[VOCABULARY], params=params),
        5: pb.Submit(work=pb.WORK_ALL, prompt_ids=[1], params=pb.SamplingParams(temperature=float("nan"), top_p=1)),
        6: pb.Submit(work=pb.WORK_ALL, prompt_ids=[1], params=params, output_ids=[1, 2, 3, 4], first_index=4),
        7: pb.Submit(work=pb.WORK_ALL, prompt_ids=[1], params=params, first_index=3),
        8: pb.Submit(work=pb.WORK_ALL, prompt_ids=[1] * 5000, params=params),  # more than the pool
        9: pb.Submit(work=pb.WORK_ALL, prompt_ids=[1], params=params, cache_salt=b"s" * 65),
    }
    async with serving() as worker, Gateway(worker.address) as gateway:
        await gateway.submit(100, prompt_of(100, 30), 40)
        for number, submit in bad.items():
            submit.request = number
            await gateway.write(pb.ToWorker(submit=submit))
        await gateway.finished(100, *bad)
        assert set(gateway.failures) == set(bad)
        assert {failure.code for failure in gateway.failures.values()} == {pb.FAILURE_CODE_INVALID}
        assert all(failure.message for failure in gateway.failures.values())
        assert gateway.tokens[100] == expected(prompt_of(100, 30), 40)
        await worker.empty()


async def test_the_same_attempt_twice_is_refused_but_a_later_one_runs() -> None:
    async with serving() as worker, Gateway(worker.address) as gateway:
        worker.runner.gate.clear()
        await gateway.submit(1, prompt_of(1, 20), 5)
        await gateway.submit(1, prompt_of(1, 20), 5)
        await gateway.until(lambda: 1 in gateway.failures)
        assert gateway.failures[1].code == pb.FAILURE_CODE_INVALID
        await gateway.cancel(1)
        await worker.sessions_have(0)
        await gateway.submit(1, prompt_of(1, 20), 5, attempt=1)
        worker.runner.gate.set()
        await gateway.until(lambda: 1 in gateway.finishes)
        assert gateway.tokens[1] == expected(prompt_of(1, 20), 5)
        assert {attempt for step in gateway.steps for attempt in step.attempts} == {1}
        await worker.empty()


async def test_a_cancel_spares_later_attempts() -> None:
    async with serving() as worker, Gateway(worker.address) as gateway:
        worker.runner.gate.clear()
        for attempt in range(3):
            await gateway.submit(1, prompt_of(1, 20), 5, attempt=attempt)
        await gateway.cancel(1, attempt=1)
        await worker.sessions_have(1)
        worker.runner.gate.set()
        await gateway.until(lambda: 1 in gateway.finishes)
        assert {attempt for step in gateway.steps for attempt in step.attempts} == {2}
        await worker.empty()


async def test_a_replay_goes_on_where_the_output_ended() -> None:
    prompt = prompt_of(1, 21)
    whole = expected(prompt, 30)
    async with serving() as worker, Gateway(worker.address) as gateway:
        gateway.tokens[1] = whole[:11]
        await gateway.submit(1, prompt, 30, output_ids=whole[:11])
        await gateway.finished(1)
        assert gateway.tokens[1] == whole
        await worker.empty()


async def test_a_deadline_that_passes_is_a_failure() -> None:
    async with serving() as worker, Gateway(worker.address) as gateway:
        worker.runner.pace_s = 0.002
        await gateway.submit(1, prompt_of(1, 20), 3000, timeout_s=0.1)
        await gateway.submit(2, prompt_of(2, 20), 30, timeout_s=1000)
        await gateway.finished(1, 2)
        assert set(gateway.failures) == {1}
        assert gateway.failures[1].code == pb.FAILURE_CODE_DEADLINE
        await worker.empty()


async def test_a_runner_that_fails_fails_its_step_alone() -> None:
    async with serving() as worker, Gateway(worker.address) as gateway:
        worker.runner.fail_with = RuntimeError("a secret of the prompt")
        await gateway.submit(1, prompt_of(1, 20), 5)
        await gateway.finished(1)
        assert gateway.failures[1].code == pb.FAILURE_CODE_INTERNAL
        assert "secret" not in gateway.failures[1].message
        await gateway.submit(2, prompt_of(1, 20), 5)
        await gateway.finished(2)
        assert gateway.tokens[2] == expected(prompt_of(1, 20), 5)
        await worker.empty()


STATES = [
    ("both", Work.ALL, State.WAITING),
    ("both", Work.ALL, State.RUNNING),
    ("prefill", Work.PREFILL, State.RUNNING),
    ("prefill", Work.PREFILL, State.HELD),
    ("decode", Work.DECODE, State.AWAITING),
    ("decode", Work.DECODE, State.RUNNING),
]


@pytest.mark.parametrize("lost", [False, True], ids=["cancelled", "session lost"])
@pytest.mark.parametrize(("role", "work", "state"), STATES)
async def test_nothing_is_left_from_any_state(role: str, work: Work, state: State, lost: bool) -> None:
    async with serving(role, max_batch=1) as worker, Gateway(worker.address) as neighbour:
        gateway = await Gateway(worker.address).__aenter__()
        target = gateway.key(1)
        if state is State.WAITING:
            await neighbour.submit(9, prompt_of(9, 20), 400)
            await neighbour.until(lambda: neighbour.tokens[9])
        await gateway.submit(1, prompt_of(1, 900 if state is State.RUNNING else 90), 500, work)
        if (work, state) == (Work.DECODE, State.RUNNING):
            await worker.until(lambda: worker.core.state_of(target) is State.AWAITING)
            await worker.call(lambda: arrive(worker, target))
            await gateway.until(lambda: gateway.tokens[1])
        elif (work, state) != (Work.PREFILL, State.RUNNING):  # that one is over too soon to be seen for certain
            await worker.until(lambda: worker.core.state_of(target) is state)
        if lost:
            await gateway.close()
        else:
            await gateway.cancel(1)
        await worker.until(lambda: worker.core.state_of(target) is None)
        await neighbour.submit(10, prompt_of(10, 20), 6)
        await neighbour.finished(*([9, 10] if state is State.WAITING else [10]))
        assert neighbour.tokens[10] == expected(prompt_of(10, 20), 6)
        await worker.empty()
        await gateway.close()


def arrive(worker: Worker, key: SequenceKey) -> None:
    """The KV of a DECODE sequence is there, on the engine's thread."""
    sequence = worker.core._roster.live[key]
    worker.runner.fill(sequence.pages, sequence.tokens)
    output = worker.core.kv_arrived(key, Token(fake_runner.next_token(sequence.tokens, VOCABULARY)), None)
    assert output is not None
    worker.driver.emit(StepResult(outputs=[output]))


async def test_token_0_is_repeated_before_the_tokens_that_follow() -> None:
    async with serving("decode") as worker, Gateway(worker.address) as gateway:
        prompt = prompt_of(1, 33)
        await gateway.submit(1, prompt, 8, Work.DECODE)
        await worker.until(lambda: worker.core.state_of(gateway.key(1)) is State.AWAITING)
        await worker.call(lambda: arrive(worker, gateway.key(1)))
        await gateway.finished(1)
        assert gateway.tokens[1] == expected(prompt, 8)  # `_note` checks the order of indices
        await worker.empty()


async def test_a_prefill_counts_until_it_is_released() -> None:
    async with serving("prefill") as worker, Gateway(worker.address) as gateway:
        await gateway.submit(1, prompt_of(1, 50), 8, Work.PREFILL)
        await gateway.until(lambda: gateway.tokens[1])
        assert gateway.tokens[1] == expected(prompt_of(1, 50), 1)
        assert worker.sessions.live == 1
        await worker.call(lambda: worker.core.release(gateway.key(1)))
        await worker.empty()


async def test_a_later_session_of_the_same_gateway_takes_over() -> None:
    async with serving() as worker:
        async with Gateway(worker.address) as first, Gateway(worker.address) as other:
            await first.submit(1, prompt_of(1, 20), 2000)
            await other.submit(1, prompt_of(2, 20), 50)
            await first.until(lambda: first.tokens[1])
            async with Gateway(worker.address, incarnation=first.incarnation) as second:
                assert (await first.status())[0] is grpc.StatusCode.UNAVAILABLE
                await second.submit(2, prompt_of(3, 20), 30)
                await second.finished(2)
                assert second.tokens == {2: expected(prompt_of(3, 20), 30)}
                await other.finished(1)
                assert other.tokens[1] == expected(prompt_of(2, 20), 50)
        await worker.empty()


async def test_too_many_gateways_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions_module, "MAX_SESSIONS", 1)
    async with serving() as worker, Gateway(worker.address) as first:
        assert (await Gateway(worker.address).refusal())[0] is grpc.StatusCode.RESOURCE_EXHAUSTED
        async with Gateway(worker.address, incarnation=first.incarnation):
            pass


async def test_too_many_sequences_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions_module, "MAX_LIVE", 3)
    async with serving() as worker, Gateway(worker.address) as gateway:
        worker.runner.gate.clear()
        for n in range(5):
            await gateway.submit(n, prompt_of(n, 20), 5)
        await gateway.until(lambda: len(gateway.failures) == 2)
        worker.runner.gate.set()
        await gateway.finished(*range(5))
        assert set(gateway.failures) == {3, 4}
        assert {failure.code for failure in gateway.failures.values()} == {pb.FAILURE_CODE_DRAINING}
        await worker.empty()


async def test_a_silent_gateway_is_cut() -> None:
    async with serving() as worker, Gateway(worker.address) as silent, Gateway(worker.address) as lively:
        await silent.submit(1, prompt_of(1, 20), 2000)
        await silent.until(lambda: silent.tokens[1])
        now = worker.sessions.clock()
        for at in range(1, 12):
            await lively.call.write(pb.ToWorker(heartbeat=pb.Heartbeat(sequence=at)))
            await lively.submit(at, prompt_of(at, 5), 2)
            await lively.finished(at)
            worker.sessions.clock = lambda at=at: now + at  # type: ignore[misc]
            worker.sessions.beat()
        assert (await silent.status())[0] is grpc.StatusCode.UNAVAILABLE
        assert lively.reader is not None
        assert not lively.reader.done()
        await worker.empty()


async def test_a_pause_of_our_own_cuts_nobody() -> None:
    async with serving() as worker, Gateway(worker.address) as gateway:
        now = worker.sessions.clock()
        worker.sessions.clock = lambda: now + 3600
        worker.sessions.beat()
        await gateway.submit(1, prompt_of(1, 5), 2)
        await gateway.finished(1)


async def test_a_gateway_that_reads_nothing_is_cut_and_its_neighbour_is_not() -> None:
    async with serving(buffer_bytes=1 << 16, pages=3000) as worker, Gateway(worker.address) as neighbour:
        worker.runner.logprobs, worker.runner.pace_s = 200, 0.002  # so that few steps are enough
        frozen = Gateway(worker.address)
        await frozen.call.write(frozen.hello)
        for n in range(8):
            await frozen.submit(n, prompt_of(n, 20), 4000)
        await neighbour.submit(1, prompt_of(1, 20), 200)
        await worker.until(lambda: worker.core.state_of(frozen.key(0)) is not None)
        await worker.until(lambda: worker.core.state_of(frozen.key(0)) is None)
        assert worker.core.load().steps < 3000  # cut, not done
        await neighbour.finished(1)
        assert neighbour.tokens[1] == expected(prompt_of(1, 20), 200)
        await worker.empty()
        await frozen.close()


async def test_a_status_is_told_beside_what_waits() -> None:
    async with serving() as worker:
        session = worker.sessions.open(draw_identity("gateway", "here"))
        assert session.outbox.put(pb.FromWorker(step=pb.Step(step=1)))
        worker.sessions.draining = True
        worker.sessions.beat()
        session.end(None, flush=True)
        kinds = []
        while (taken := await session.outbox.take()) is not None:
            kinds.append((taken[0].WhichOneof("kind"), taken[0].status.draining))
        assert kinds == [("step", False), ("status", True)]


async def test_draining_lets_go_on_what_runs() -> None:
    async with serving() as worker, Gateway(worker.address) as gateway:
        worker.runner.gate.clear()
        await gateway.submit(1, prompt_of(1, 20), 50)
        await worker_has(worker, 1)
        drained = asyncio.create_task(worker.sessions.drain(20))
        await gateway.until(lambda: gateway.statuses and gateway.statuses[-1].draining)
        await gateway.submit(2, prompt_of(2, 20), 50)
        await gateway.until(lambda: 2 in gateway.failures)
        assert gateway.failures[2].code == pb.FAILURE_CODE_DRAINING
        worker.runner.gate.set()
        assert await drained
        await gateway.finished(1)
        assert gateway.tokens[1] == expected(prompt_of(1, 20), 50)
        await worker.empty()


async def test_draining_cuts_what_takes_too_long() -> None:
    async with serving() as worker, Gateway(worker.address) as gateway:
        worker.runner.gate.clear()
        await gateway.submit(1, prompt_of(1, 20), 50)
        await worker_has(worker, 1)
        assert not await worker.sessions.drain(0.05)
        await gateway.finished(1)
        assert gateway.failures[1].code == pb.FAILURE_CODE_DRAINING
        await worker.empty()


async def test_a_held_worker_finishes_what_it_has_and_takes_work_again() -> None:
    async with serving() as worker, Gateway(worker.address) as gateway:
        worker.runner.gate.clear()
        await gateway.submit(1, prompt_of(1, 20), 50)
        await worker_has(worker, 1)
        await gateway.write(pb.ToWorker(drain=pb.Drain(drain=True)))
        await gateway.until(lambda: gateway.statuses and gateway.statuses[-1].draining)
        async with Gateway(worker.address) as later:  # another gateway may come, and learns of it
            assert later.worker_hello is not None
            assert later.worker_hello.draining
            await later.submit(7, prompt_of(7, 20), 5)
            await later.until(lambda: 7 in later.failures)
            assert later.failures[7].code == pb.FAILURE_CODE_DRAINING
        worker.runner.gate.set()
        await gateway.finished(1)
        assert gateway.tokens[1] == expected(prompt_of(1, 20), 50)
        await gateway.write(pb.ToWorker(drain=pb.Drain(drain=False)))
        await gateway.until(lambda: not gateway.statuses[-1].draining)
        await gateway.submit(2, prompt_of(2, 20), 5)
        await gateway.finished(2)
        await worker.empty()


@pytest.mark.parametrize("undrained", [False, True])
async def test_a_held_worker_gives_up_what_takes_too_long(undrained: bool) -> None:
    async with serving() as worker, Gateway(worker.address) as gateway:
        worker.runner.gate.clear()
        await gateway.submit(1, prompt_of(1, 20), 50)
        await worker_has(worker, 1)
        if undrained:
            worker.sessions.hold(True, 0.1)
            worker.sessions.hold(False, 0.0)
            await asyncio.sleep(0.2)
            worker.runner.gate.set()
        else:
            await gateway.write(pb.ToWorker(drain=pb.Drain(drain=True, within_ms=100)))
        await gateway.finished(1)
        assert (1 in gateway.failures) is not undrained
        worker.runner.gate.set()
        await worker.empty()


async def test_a_role_is_taken_on_once() -> None:
    async with serving("decode") as worker, Gateway(worker.address) as gateway:
        for role in (pb.ROLE_DECODE, 9, pb.ROLE_PREFILL, pb.ROLE_BOTH):
            await gateway.write(pb.ToWorker(set_role=pb.SetRole(role=role)))  # type: ignore[arg-type]
        await worker.until(worker.sessions.role_wanted.is_set)
        assert worker.sessions.next_role == "prefill"


async def test_an_idle_worker_drains_at_once() -> None:
    async with serving() as worker:
        assert await worker.sessions.drain(20)


async def worker_has(worker: Worker, count: int) -> None:
    async with asyncio.timeout(20):
        while worker.sessions.live < count:
            await asyncio.sleep(0.005)


async def test_a_thousand_requests_cancelled_at_random_moments() -> None:
    random_ = random.Random(5)
    async with serving(pages=120, max_batch=12) as worker:
        gateways = [await Gateway(worker.address).__aenter__() for _ in range(3)]

        async def life(number: int) -> None:
            gateway = gateways[number % 3]
            count = random_.choice([1, 3, 10, 100, 400])
            prompt = prompt_of(number % 7, random_.choice([1, 15, 16, 17, 64, 200]))
            await gateway.submit(number, prompt, count)
            await asyncio.sleep(random_.random() * 0.05)
            if random_.random() < 0.9:
                await gateway.cancel(number)
            else:
                await gateway.finished(number)
                assert gateway.tokens[number] == expected(prompt, count)

        for wave in range(20):
            await asyncio.gather(*[life(wave * 50 + n) for n in range(50)])
        for gateway in gateways:
            assert not gateway.failures
            await gateway.close()
        await worker.empty()


# Several samples


async def test_samples_are_submitted_as_one_and_end_by_themselves() -> None:
    async with serving() as worker, Gateway(worker.address) as gateway:
        prompt = prompt_of(1, 21)
        worker.runner.gate.clear()
        await gateway.submit(1, prompt, 9, samples=3)
        await worker.sessions_have(3)
        worker.runner.gate.set()
        names = [1, (1, 1), (1, 2)]
        await gateway.finished(*names)
        assert [gateway.tokens[name] for name in names] == [expected(prompt, 9, sample) for sample in range(3)]
        await worker.empty()
        assert worker.sessions.status().prefilled_tokens == 21


@pytest.mark.parametrize("samples", [[0], [1], [0, 2], [0, 1, 2], []])
async def test_a_cancel_names_one_sample_or_none(samples: list[int]) -> None:
    """No samples: all of them."""
    async with serving() as worker, Gateway(worker.address) as gateway:
        prompt = prompt_of(2, 21)
        worker.runner.gate.clear()
        await gateway.submit(1, prompt, 9, samples=3)
        await worker.sessions_have(3)
        await gateway.cancel(*([1] * max(1, len(samples))), samples=samples)
        rest = [sample for sample in range(3) if samples and sample not in samples]
        await worker.sessions_have(len(rest))
        worker.runner.gate.set()
        names = [(1, sample) if sample else 1 for sample in rest]
        await gateway.finished(*names)
        assert dict(gateway.tokens) == {
            name: expected(prompt, 9, sample) for name, sample in zip(names, rest, strict=True)
        }
        await worker.empty()


async def test_every_sample_is_told_of_a_failure() -> None:
    async with serving(max_batch=4) as worker, Gateway(worker.address) as gateway:
        await gateway.submit(1, [1, 2], 9, samples=5)  # the engine refuses
        await gateway.submit(2, [1, 2], 9, samples=3, output_ids=[4])
        await gateway.submit(4, [1, 2], 9, samples=17)  # the wire does; no more are told of than there can be
        worker.runner.gate.clear()
        await gateway.submit(5, [1, 2], 9, samples=3)
        await gateway.submit(5, [1, 2], 9, samples=1)  # there is one already
        await gateway.until(lambda: len(gateway.failures) == 5 + 3 + 16 + 1)
        worker.runner.gate.set()
        await gateway.until(lambda: len(gateway.failures) + len(gateway.finishes) >= 5 + 3 + 16 + 3)
        told = [name if isinstance(name, int) else name[0] for name in gateway.failures]
        assert [told.count(number) for number in (1, 2, 4, 5)] == [5, 3, 16, 1]
        await worker.empty()


async def test_a_held_prefill_counts_with_all_its_samples_until_it_is_released() -> None:
    async with serving("prefill") as worker, Gateway(worker.address) as gateway:
        await gateway.submit(1, prompt_of(3, 21), 9, Work.PREFILL, samples=3)
        await gateway.until(lambda: len(gateway.tokens) == 3)
        assert worker.sessions.live == 3
        await gateway.cancel(1, samples=[0])
        await worker.sessions_have(2)
        await worker.call(lambda: worker.core.release(gateway.key(1)))
        await worker.sessions_have(0)
        await worker.empty()
