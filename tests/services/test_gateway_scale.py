"""What the gateway guarantees among 200 workers without engines, beside `test_scale.py`: how equal equal work is, how
long anybody waits behind prefixes that workers have cached, and what a waiting request costs.

From the request's coroutine (`Lifecycle.generate`) to the workers' sessions everything is the real part. Time is
counted in steps of the workers, so that nothing here depends on the machine.
"""

import asyncio
import gc
import random
import statistics
import tracemalloc
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from twostroke.errors import Overloaded
from twostroke.services.gateway.admission import Admission
from twostroke.services.gateway.attempts import Attempts
from twostroke.services.gateway.fleet import Fleet
from twostroke.services.gateway.flight import Flight
from twostroke.services.gateway.generation import GenerationRequest, Piece, Sampling, Stopping, TokenInput
from twostroke.services.gateway.lifecycle import Lifecycle
from twostroke.services.gateway.router import AFFINITY, Role
from twostroke.services.gateway.served_model import ServedModel
from twostroke.services.gateway.turns import Turns
from twostroke.services.identity import draw_identity

from .scale import BUDGET, MAX_TOKENS, ScaleWorker, World, token_of

WORKERS = 100  # of each role
REQUESTS = 6_000
PLACES = 2048
CLIENTS = 2500  # more than there are places: some are refused
VOCABULARY = 256
TOLD_S = 0.02  # a refused client comes back so much later


class Silent:
    """Stands for tokenizer and detokenizer: requests are token ids, and their text does not matter."""

    vocab_size = VOCABULARY
    has_chat_template = False

    def push(self, token_id: int) -> str:
        return ""

    def flush(self) -> str:
        return ""


@dataclass
class Clients:
    """Send requests; each answer is checked, token by token."""

    lifecycle: Lifecycle
    world: World
    refused: int = 0
    finished: int = 0
    slowest: int = 0  # steps from admission to the end

    async def ask(self, number: int, prompt: Sequence[int], count: int) -> None:
        """Until it is admitted, and to its end."""
        request = GenerationRequest(
            input=TokenInput(prompt),
            sampling=Sampling(temperature=0.0, seed=number),
            stopping=Stopping(max_tokens=count, ignore_eos=True),
            request_id=str(number),
        )
        got: list[int] = []
        ends = 0

        async def send(piece: Piece) -> None:
            nonlocal ends
            assert not ends, "a piece after the last one"
            assert piece.first_index == len(got), "an index is missing or doubled"
            got.extend(piece.token_ids)
            ends += piece.finish is not None

        while True:
            begun = self.world.steps
            try:
                await self.lifecycle.generate(request, send)
                break
            except Overloaded as refusal:
                assert self.world.steps == begun, "a refusal takes no time"
                assert refusal.retry_after_s
                self.refused += 1
                await asyncio.sleep(TOLD_S)
        assert got == [token_of(number, index) for index in range(count)]
        assert ends == 1
        self.finished += 1
        self.slowest = max(self.slowest, self.world.steps - begun)


@dataclass
class Gateway:
    """Its parts without the doors, and the workers."""

    admission: Admission = field(default_factory=lambda: Admission(PLACES))

    def __post_init__(self) -> None:
        identity = draw_identity("gateway", "here")
        self.fleet = Fleet([], identity, "scale", silence_s=10)
        self.world = World(self.fleet, identity.incarnation, WORKERS, WORKERS)
        silent = Silent()
        model = ServedModel(
            name="scale",
            context_length=MAX_TOKENS,
            max_input=MAX_TOKENS - 1,
            max_output=MAX_TOKENS - 1,
            vocabulary_size=VOCABULARY,
            eos_token_ids=(2,),
            longest_token=1,
            tokenizer=silent,  # type: ignore[arg-type]
            detokenizer=lambda: silent,
            threads=ThreadPoolExecutor(1),
        )
        self.lifecycle = Lifecycle(
            model,
            self.fleet,
            self.admission,
            incarnation=identity.incarnation,
            stream_buffer_bytes=1 << 16,
            slow_reader_s=30,
        )
        self.lifecycle._turns = Turns(1 << 20)  # steps here are rounds of the loop: what came is written within one
        self.clients = Clients(self.lifecycle, self.world)

    async def serve(self, work: Iterable[tuple[Sequence[int], int]], clients: int = CLIENTS) -> None:
        """Runs (prompt, output length) of `work` to the end; so many clients take from it."""
        done, numbered = asyncio.Event(), enumerate(work)

        async def lane() -> None:
            for number, (prompt, count) in numbered:
                assert self.admission.inside <= PLACES
                await self.clients.ask(number, prompt, count)

        async def lanes() -> None:
            try:
                async with asyncio.TaskGroup() as group:
                    for _ in range(clients):
                        group.create_task(lane())
            finally:
                done.set()

        asking = asyncio.create_task(lanes())
        await self.world.run(done)
        await asking

    def check_idle(self) -> None:
        """Nothing of any request is left."""
        assert self.admission.inside == 0
        for worker in self.world.workers:
            assert worker.session.waiting == 0, worker.session.name
            assert worker.session.outbox.empty
            assert worker.session.load.sequences == 0
            assert worker.session.load.waiting_tokens == 0
        gc.collect()
        assert not [thing for thing in gc.get_objects() if type(thing) in (Flight, Attempts)]


def spread(workers: list[ScaleWorker], of: Callable[[ScaleWorker], float]) -> tuple[float, float]:
    """What the worker with the least and the one with the most have, by the mean."""
    values = [of(worker) for worker in workers]
    mean = statistics.fmean(values)
    return min(values) / mean, max(values) / mean


async def test_equal_work_is_shared_equally() -> None:
    """Requests that are alike in size and have nothing in common: nobody gets a tenth more than the mean."""
    chance = random.Random(1)
    gateway = Gateway()
    await gateway.serve((chance.choices(range(3, 250), k=100), 4) for _ in range(REQUESTS))
    gateway.check_idle()
    clients = gateway.clients
    assert clients.finished == REQUESTS
    assert clients.refused > 0
    for role in (Role.PREFILL, Role.DECODE):
        workers = gateway.world.of(role)
        least, most = spread(workers, lambda worker: worker.taken)
        assert least > 0.9, role
        assert most < 1.1, role
        assert max(worker.most for worker in workers) < 1.5 * PLACES / WORKERS, role
    queue = PLACES / WORKERS * 100 / BUDGET  # steps that an equal share of all places takes
    assert max(worker.longest_wait for worker in gateway.world.workers) <= 2 * queue
    assert clients.slowest <= 2 * queue + 4 + 4


async def test_mixed_work_starves_nobody() -> None:
    """Prompts of 1 to 2,000 tokens, a few long, half of them with one of 20 beginnings, the first the most common.

    A worker that has a prompt cached may have a longer queue, but no longer than that is worth.
    """
    chance, count = random.Random(2), REQUESTS // 2
    gateway = Gateway()
    heads = [chance.choices(range(3, 250), k=chance.randrange(64, 800)) for _ in range(20)]
    weights = [1 / (rank + 1) for rank in range(len(heads))]
    work = []
    for _ in range(count):
        head = chance.choices(heads, weights)[0] if chance.random() < 0.5 else []
        prompt = head + chance.choices(range(3, 250), k=min(1200, int(1 + chance.paretovariate(1.1) * 20)))
        work.append((prompt, chance.randrange(1, 13)))
    longest = max(len(prompt) for prompt, _ in work)
    await gateway.serve(work)
    gateway.check_idle()
    assert gateway.clients.finished == count
    mean = max(gateway.world.waiting_tokens) / WORKERS  # of all queues at their longest
    bound = (mean + AFFINITY * longest + longest) / BUDGET  # steps
    prefill, decode = gateway.world.of(Role.PREFILL), gateway.world.of(Role.DECODE)
    assert max(worker.longest_wait for worker in prefill) <= bound
    assert max(worker.longest_wait for worker in decode) <= 1
    assert gateway.clients.slowest <= bound + 1 + 12 + 4
    assert spread(prefill, lambda worker: worker.tokens)[1] < 3
    assert spread(decode, lambda worker: worker.tokens)[1] < 2
    assert min(spread(workers, lambda worker: worker.taken)[0] for workers in (prefill, decode)) > 0.1
    computed = sum(worker.tokens for worker in prefill)
    assert computed < 0.7 * sum(len(prompt) for prompt, _ in work), "what is cached is hardly used"


async def test_what_waits_costs_little_memory() -> None:
    """500 requests of 100 tokens that nobody answers yet, and what is left of them once they are cancelled."""
    gateway = Gateway()
    chance = random.Random(3)
    prompts = [chance.choices(range(3, 250), k=100) for _ in range(600)]

    async def hold(first: int, last: int) -> list[asyncio.Task[None]]:
        asking = [asyncio.create_task(gateway.clients.ask(i, prompts[i], 4)) for i in range(first, last)]
        while gateway.admission.inside < last - first:
            await asyncio.sleep(0)
        for _ in range(3):
            await asyncio.sleep(0)
        return asking

    async def cancel(asking: list[asyncio.Task[None]]) -> None:
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
        for worker in gateway.world.workers:
            await worker.receive(0)
        await asyncio.sleep(0)  # what the loop was to call still

    await cancel(await hold(0, 100))  # what is made once
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        asking = await hold(100, 600)
        gc.collect()
        held = (tracemalloc.get_traced_memory()[0] - before) / 500
        await cancel(asking)
        del asking
        gc.collect()
        left = (tracemalloc.get_traced_memory()[0] - before) / 500
    finally:
        tracemalloc.stop()
    assert held < 25_000  # bytes a request, of which its prompt takes three times 800
    assert left < 8_000  # what is remembered of the prefixes, which is bounded for all
    gateway.check_idle()
