"""Workers without engines for the gateway at scale: real sessions and messages, no sockets, steps instead of time.

All of it runs on the test's loop: `World.run` lets every worker take what it was sent, make one step, and answer.
"""

import asyncio
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from twostroke.engine.request import FinishReason, Request, SequenceKey, SequenceOutput, SequenceTimings, Token, Work
from twostroke.services.gateway.fleet import Fleet
from twostroke.services.gateway.router import Role
from twostroke.services.gateway.worker_session import WorkerSession
from twostroke.services.identity import draw_identity
from twostroke.services.worker.wire import pack_step, read_submit
from twostroke.v1 import worker_pb2 as pb

PAGE = 16
PAGES = 4096
MAX_BATCH = 64
MAX_TOKENS = 4096
BUDGET = 512  # prompt tokens a step
STATUS_STEPS = 8  # between two words about the load


def token_of(number: int, index: int) -> int:
    """What workers make at an index, so that a mix-up of requests is seen."""
    return 3 + (31 * number + 7 * index) % 250


@dataclass(eq=False)
class Sequence:
    """A sequence at a worker."""

    request: Request
    left: int  # prompt tokens to compute
    since: int  # the step in which it came
    made: int = 0  # output tokens


@dataclass(eq=False)
class ScaleWorker:
    """Prefill: a queue, BUDGET tokens a step, first come first served. Decode: a token a step for up to MAX_BATCH."""

    session: WorkerSession
    gateway: int
    taken: int = 0  # sequences that came
    tokens: int = 0  # prompt tokens computed, or output tokens made
    most: int = 0  # sequences that were here at once
    longest_wait: int = 0  # steps in a queue
    waiting: deque[Sequence] = field(default_factory=deque)
    running: dict[SequenceKey, Sequence] = field(default_factory=dict)
    ready: set[SequenceKey] = field(default_factory=set)  # DECODE: their prompt is computed
    cached: set[int] = field(default_factory=set)  # chains of the full pages that it has met; nothing is evicted

    @property
    def prefills(self) -> bool:
        """Its role."""
        return self.session.load.role is Role.PREFILL

    @property
    def waiting_tokens(self) -> int:
        """Prompt tokens to be computed."""
        return sum(each.left for each in self.waiting)

    async def receive(self, step: int) -> None:
        """Takes what was sent to it. The outbox is never waited for."""
        while not self.session.outbox.empty:
            taken = await self.session.outbox.take()
            if taken is None:
                return
            message, size = taken
            self.session.outbox.written(size)
            match message.WhichOneof("kind"):
                case "submit":
                    self._submit(message.submit, step)
                case "cancel":
                    for number in message.cancel.requests:
                        self._drop(number)

    def _submit(self, submit: pb.Submit, step: int) -> None:
        request, _ = read_submit(self.gateway, submit, 0.0)
        if (request.work is Work.DECODE) is self.prefills:
            raise AssertionError(f"a {self.session.load.role.name} worker was sent {request.work.name}")
        self.taken += 1
        self.waiting.append(Sequence(request, self._uncached(request.prompt_ids), step))
        self.most = max(self.most, len(self.waiting) + len(self.running))

    def _uncached(self, prompt: list[int]) -> int:
        """Tokens to compute; its full pages are met from now on."""
        chain, cached, met = 0, 0, True
        for page in range((len(prompt) - 1) // PAGE):
            chain = hash((chain, *prompt[page * PAGE : (page + 1) * PAGE]))
            met = met and chain in self.cached
            cached += met * PAGE
            self.cached.add(chain)
        return len(prompt) - cached

    def _drop(self, number: int) -> None:
        for key in [key for key in self.running if key.request == number]:
            del self.running[key]
        self.waiting = deque(each for each in self.waiting if each.request.key.request != number)

    def step(self, step: int) -> list[SequenceKey]:
        """One step; returns the sequences whose prompt is done."""
        done = self._prefill(step) if self.prefills else self._decode(step)
        if step % STATUS_STEPS == 0:
            self.session.receive(pb.FromWorker(status=self._status()))
        return done

    def _prefill(self, step: int) -> list[SequenceKey]:
        budget, done = BUDGET, []
        while self.waiting and budget:
            sequence = self.waiting[0]
            used = min(budget, sequence.left)
            budget -= used
            sequence.left -= used
            self.tokens += used
            if sequence.left == 0:
                self.waiting.popleft()
                self.longest_wait = max(self.longest_wait, step - sequence.since)
                if sequence.request.work is Work.PREFILL:
                    done.append(sequence.request.key)
                self._say(step, [self._output(sequence)])
        return done

    def _decode(self, step: int) -> list[SequenceKey]:
        while self.waiting and len(self.running) < MAX_BATCH:
            sequence = self.waiting.popleft()
            self.longest_wait = max(self.longest_wait, step - sequence.since)
            self.running[sequence.request.key] = sequence
        outputs = [self._output(sequence) for key, sequence in self.running.items() if key in self.ready]
        self.tokens += len(outputs)
        for output in outputs:
            if output.finish is not None:
                del self.running[output.key]
                self.ready.discard(output.key)
        if outputs:
            self._say(step, outputs)
        return []

    def _output(self, sequence: Sequence) -> SequenceOutput:
        request, index = sequence.request, sequence.made
        sequence.made += 1
        last = sequence.made >= request.params.max_tokens
        return SequenceOutput(
            request.key,
            index,
            [Token(token_of(request.params.seed, index))],
            FinishReason.LENGTH if last else None,
            SequenceTimings() if last or index == 0 else None,
        )

    def _say(self, step: int, outputs: list[SequenceOutput]) -> None:
        self.session.receive(pack_step(step, outputs))

    def _status(self) -> pb.Status:
        here = [*self.waiting, *self.running.values()]
        used = sum(len(each.request.prompt_ids) // PAGE + 1 for each in here)
        return pb.Status(
            free_pages=max(0, PAGES - used),
            pages=PAGES,
            running=len(self.running),
            waiting=len(self.waiting),
            waiting_tokens=self.waiting_tokens if self.prefills else 0,
        )


class World:
    """All workers of a fleet."""

    def __init__(self, fleet: Fleet, gateway: int, prefill: int, decode: int) -> None:
        """They join the fleet at once."""
        self.fleet = fleet
        self.steps = 0
        self.waiting_tokens = [0]  # prompt tokens in all queues, at each step
        roles = [pb.ROLE_PREFILL] * prefill + [pb.ROLE_DECODE] * decode
        self.workers = [self._join(gateway, role, number) for number, role in enumerate(roles)]
        self._held: set[SequenceKey] = set()  # prompts that are done before the decode worker heard of them

    def _join(self, gateway: int, role: pb.Role.ValueType, number: int) -> ScaleWorker:
        name = f"{'p' if role == pb.ROLE_PREFILL else 'd'}{number}"
        form = pb.ModelFormat(model="scale", kv_dtype="float32", page_size=PAGE, layers=2, kv_heads=2, head_dim=16)
        hello = pb.WorkerHello(
            identity=draw_identity(name, "here").message(),
            role=role,
            format=form,
            address=f"127.0.0.1:{number + 1}",
            pages=PAGES,
            max_batch=MAX_BATCH,
            max_tokens=MAX_TOKENS,
        )
        session = WorkerSession(hello, gateway)
        self.fleet.joined(session)
        return ScaleWorker(session, gateway)

    def of(self, role: Role) -> list[ScaleWorker]:
        """The workers of a role."""
        return [worker for worker in self.workers if worker.session.load.role is role]

    async def run(self, until: asyncio.Event) -> None:
        """Steps all workers, and lets the gateway run in between, until the event is set."""
        while not until.is_set():
            self.steps += 1
            for worker in self.workers:
                await worker.receive(self.steps)
            self.waiting_tokens.append(sum(worker.waiting_tokens for worker in self.workers if worker.prefills))
            done = [key for worker in self.workers for key in worker.step(self.steps)]
            self._hand_over(done)
            await asyncio.sleep(0)

    def _hand_over(self, done: Iterable[SequenceKey]) -> None:
        """The decode worker of a prompt that is done may go on."""
        self._held.update(done)
        for worker in self.of(Role.DECODE):
            arrived = [key for key in worker.running if key in self._held]
            worker.ready.update(arrived)
            self._held.difference_update(arrived)
