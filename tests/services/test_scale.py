"""The gateway's routing and queues at scale, without engines: 200 workers, 20,000 requests, fair and bounded.

Workers stand in at the sessions' level: they batch, they wait for KV, they report loads, as real ones do, but compute
nothing. Everything before them is the real thing, from admission to the last piece.
"""

import asyncio
import random
import time
from collections import Counter, deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import pytest

from twostroke.engine.request import FinishReason, SequenceKey, SequenceOutput, SequenceTimings, Token
from twostroke.errors import Overloaded
from twostroke.services.gateway.admission import Admission
from twostroke.services.gateway.fleet import Fleet
from twostroke.services.gateway.generation import GenerationRequest, Piece, Stopping, TokenInput
from twostroke.services.gateway.lifecycle import Lifecycle
from twostroke.services.gateway.served_model import ServedModel
from twostroke.services.gateway.worker_session import WorkerSession
from twostroke.services.identity import draw_identity
from twostroke.services.worker.wire import pack_step
from twostroke.v1 import worker_pb2 as pb

GATEWAY = draw_identity("gateway", "here")
PAGE, PAGES, BATCH, BUDGET = 16, 4000, 16, 512
WORKERS, REQUESTS, INSIDE, OUTPUT = 100, 20_000, 3000, 4
STEP_S = 0.002


@dataclass
class Job:
    """A sequence at a worker."""

    submit: pb.Submit
    key: SequenceKey
    left: int = 0  # prompt tokens to be computed
    made: int = 0  # tokens


@dataclass
class Worker:
    """Takes what its session sends and answers in steps: first come, first served."""

    session: WorkerSession
    ready: set[int]  # requests whose KV is there, of the whole cluster
    waiting: deque[Job] = field(default_factory=deque)
    running: list[Job] = field(default_factory=list)
    taken: int = 0
    longest_queue: int = 0
    steps: int = 0

    async def run(self) -> None:
        while True:
            await self._receive(wait=not self.waiting and not self.running)
            self._step()
            await asyncio.sleep(STEP_S)

    async def _receive(self, *, wait: bool) -> None:
        while wait or not self.session.outbox.empty:
            taken = await self.session.outbox.take()
            if taken is None:
                raise asyncio.CancelledError
            message, size = taken
            self.session.outbox.written(size)
            wait = False
            if message.WhichOneof("kind") == "submit":
                submit = message.submit
                key = SequenceKey(GATEWAY.incarnation, submit.request, submit.sample, submit.attempt)
                self.waiting.append(Job(submit, key, left=len(submit.prompt_ids)))
                self.taken += 1
                self.longest_queue = max(self.longest_queue, len(self.waiting))

    def _step(self) -> None:
        prefill = self.session.load.role.name == "PREFILL"
        outputs = self._prefill() if prefill else self._decode()
        self.steps += 1
        if outputs:
            self.session.receive(pack_step(self.steps, outputs))
        if self.steps % 20 == 0 or not (self.waiting or self.running):
            self.session.receive(pb.FromWorker(status=self.status()))

    def status(self) -> pb.Status:
        used = sum(-(-len(job.submit.prompt_ids) // PAGE) for job in self.running)
        return pb.Status(
            free_pages=PAGES - used,
            pages=PAGES,
            running=len(self.running),
            waiting=len(self.waiting),
            waiting_tokens=sum(job.left for job in self.waiting),
        )

    def _prefill(self) -> list[SequenceOutput]:
        budget, outputs = BUDGET, []
        while budget > 0 and self.waiting:
            job = self.waiting[0]
            share = min(budget, job.left)
            job.left -= share
            budget -= share
            if job.left == 0:
                self.waiting.popleft()
                self.ready.add(job.key.request)
                outputs.append(SequenceOutput(job.key, 0, [Token(7)], None, SequenceTimings(0.1, 0.1)))
        return outputs

    def _decode(self) -> list[SequenceOutput]:
        for _ in range(len(self.waiting)):
            if len(self.running) == BATCH:
                break
            job = self.waiting.popleft()
            (self.running if job.key.request in self.ready else self.waiting).append(job)
        outputs = []
        for job in self.running:
            finish = FinishReason.LENGTH if job.made + 1 == job.submit.params.max_tokens else None
            outputs.append(SequenceOutput(job.key, job.made, [Token(7 + job.made)], finish, None))
            job.made += 1
        self.running = [job for job in self.running if job.made < job.submit.params.max_tokens]
        return outputs


class Text:
    """Text does not matter here."""

    vocab_size, has_chat_template = 1000, False

    def push(self, _: int) -> str:
        return ""

    def flush(self) -> str:
        return ""

    def token_text(self, _: int) -> str:
        return "x"


def session_of(role: pb.Role.ValueType, number: int) -> WorkerSession:
    name = f"{pb.Role.Name(role)[5:].lower()}-{number}"
    form = pb.ModelFormat(model="m", kv_dtype="float32", page_size=PAGE, layers=1, kv_heads=1, head_dim=1)
    hello = pb.WorkerHello(
        identity=draw_identity(name, "here").message(),
        role=role,
        format=form,
        address=f"{name}:1",
        pages=PAGES,
        max_batch=BATCH,
        max_tokens=4096,
    )
    return WorkerSession(hello, GATEWAY.incarnation)


@pytest.mark.timeout(240)
async def test_two_hundred_workers_and_twenty_thousand_requests() -> None:
    fleet = Fleet([], GATEWAY, "m", silence_s=10)
    ready: set[int] = set()
    workers = [Worker(session_of(role, i), ready) for role in (pb.ROLE_PREFILL, pb.ROLE_DECODE) for i in range(WORKERS)]
    for worker in workers:
        fleet.joined(worker.session)
    with ThreadPoolExecutor(1) as threads:
        model = ServedModel("m", 4096, 4095, 4095, 1000, (), 4, Text(), Text, threads)  # type: ignore[arg-type]
        admission = Admission(INSIDE)
        lifecycle = Lifecycle(
            model,
            fleet,
            admission,
            incarnation=GATEWAY.incarnation,
            stream_buffer_bytes=1 << 16,
            slow_reader_s=30,
        )
        chance = random.Random(6)
        prefixes = [[chance.randrange(1000) for _ in range(2 * PAGE)] for _ in range(50)]
        waits: list[float] = []
        inside: list[int] = []
        refused = Counter[bool]()

        async def one(number: int) -> None:
            prompt = chance.choice(prefixes) + [chance.randrange(1000) for _ in range(chance.randrange(1, 64))]
            tokens: list[int] = []
            begun = time.monotonic()

            async def send(piece: Piece) -> None:
                assert piece.first_index == len(tokens)
                tokens.extend(piece.token_ids)

            request = GenerationRequest(
                TokenInput(prompt), stopping=Stopping(max_tokens=OUTPUT, ignore_eos=True), request_id=str(number)
            )
            while True:
                try:
                    await lifecycle.generate(request, send)
                    break
                except Overloaded:  # the queue is full, and says so at once
                    refused[True] += 1
                    assert not tokens
                    await asyncio.sleep(0.5 * (0.5 + chance.random()))
            assert tokens == [7, 8, 9, 10]
            waits.append(time.monotonic() - begun)
            inside.append(admission.inside)

        tasks = [asyncio.create_task(worker.run()) for worker in workers]
        gate = asyncio.Semaphore(INSIDE + 200)  # more clients than there are places

        async def client(number: int) -> None:
            async with gate:
                await one(number)

        began, spent = time.monotonic(), time.process_time()
        await asyncio.gather(*(client(number) for number in range(REQUESTS)))
        took = time.monotonic() - began
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    print(f"{1e3 * (time.process_time() - spent) / REQUESTS:.2f} ms of one core a request")
    print(
        f"{REQUESTS / took:.0f} requests/s, refused {refused[True]} times, longest {max(waits):.2f} s of {took:.1f} s"
    )
    # bounded: never more inside than there are places, and nothing of anything is left
    assert len(waits) == REQUESTS
    assert max(inside) < INSIDE
    assert refused[True]
    assert admission.inside == 0
    for worker in workers:
        assert worker.session.waiting == 0
        assert worker.session.outbox.free == 64 << 20
        assert (worker.session.load.waiting_tokens, worker.session.load.sequences) == (0, 0)
        assert worker.longest_queue <= 5 * INSIDE / WORKERS
    # fair: no worker is favoured, no request starves
    for half in (workers[:WORKERS], workers[WORKERS:]):
        shares = [worker.taken for worker in half]
        assert sum(shares) == REQUESTS
        assert min(shares) > 0.5 * REQUESTS / WORKERS, shares
        assert max(shares) < 2.0 * REQUESTS / WORKERS, shares
    waits.sort()
    assert waits[-1] < 6 * waits[len(waits) // 2] + 1.0
