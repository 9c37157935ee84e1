"""Load and faults on a real stack, for as long as one likes: every answer is right, every page comes back."""

import asyncio
import contextlib
import os
import random
import signal
from collections import Counter
from dataclasses import dataclass, field

import grpc
import grpc.aio

from twostroke.v1 import inference_pb2 as pb

from .harness import Answer, Stack, token_request

RETRY_S = 120.0  # a client gives up when nobody served it for so long
FAULT_S = (0.3, 4.0)  # pause between two faults
NAMES = ("prefill-0", "prefill-1", "decode-0", "decode-1", "gateway")
RETRIED = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED)
FLAGS = (
    *("--prefill", "2", "--decode", "2", "--dtype", "float32", "--kv-memory", "8MiB", "--token-budget", "128"),
    *("--silence-s", "2", "--max-attempts", "50", "--replay-wait-s", "60", "--drain-s", "10"),
)


@dataclass
class Case:
    """A request and its fault-free answer."""

    request: pb.GenerateRequest
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


@dataclass
class Soak:
    """One run."""

    stack: Stack
    chance: random.Random
    cases: list[Case] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    async def run(self, seconds: float, rate: float) -> None:
        """So many seconds of `rate` requests a second under faults; then quiet, and nothing may be left."""
        self.cases = [Case(self.request(number)) for number in range(48)]
        await asyncio.gather(*(self.learn(case) for case in self.cases))
        faults = asyncio.create_task(self.faults())
        clients: set[asyncio.Task[None]] = set()
        try:
            async with asyncio.timeout(seconds):
                while True:
                    await asyncio.sleep(self.chance.expovariate(rate))
                    if faults.done():
                        faults.result()
                    clients.add(asyncio.create_task(self.client()))
        except TimeoutError:
            pass
        faults.cancel()
        await asyncio.gather(faults, return_exceptions=True)
        await asyncio.gather(*clients)
        await self.stack.joined(prefill=2, decode=2)
        for case in self.chance.sample(self.cases, 8):
            await self.whole_answer(case)
        await self.stack.whole()

    def request(self, number: int) -> pb.GenerateRequest:
        """Lengths, samplings and shared beginnings of all kinds."""
        chance = self.chance
        prompt = [chance.randrange(3, 250) for _ in range(chance.choice((1, 15, 16, 17, 60, 200, 700)))]
        if number % 3 == 0:
            prompt[:64] = range(3, 67)
        sampling = {"temperature": 1.0, "seed": number, "top_p": 0.9} if number % 2 else {}
        if number % 4 == 1:
            sampling |= {"repetition_penalty": 1.2, "frequency_penalty": 0.3}
        request = token_request(prompt, max_tokens=chance.choice((1, 2, 30, 150, 600)), **sampling)
        if number % 5 == 0:
            request.logprobs = 2
        return request

    async def learn(self, case: Case) -> None:
        answer = await self.stack.client.generate(case.request)
        case.tokens = answer.token_ids
        case.logprobs = [entry.logprob for message in answer.messages for entry in message.logprobs]

    async def client(self) -> None:
        """One request; a fifth are cancelled at a random moment."""
        case = self.chance.choice(self.cases)
        if self.chance.random() < 0.2:
            moment = self.chance.random() * 2
            with contextlib.suppress(TimeoutError, grpc.aio.AioRpcError):
                async with asyncio.timeout(moment):
                    await self.attempt(case)
            self.counts["cancelled"] += 1
        else:
            await self.whole_answer(case)

    async def whole_answer(self, case: Case) -> None:
        """Until it has all of it: a gateway that dies takes its streams along, and its clients ask again."""
        async with asyncio.timeout(RETRY_S):
            while True:
                try:
                    answer = await self.attempt(case)
                    break
                except grpc.aio.AioRpcError as error:
                    if error.code() not in RETRIED and not _cut_off(error):
                        raise
                    self.counts["asked again"] += 1
                    await asyncio.sleep(0.1 + 0.4 * self.chance.random())
        assert answer.token_ids == case.tokens
        logprobs = [entry.logprob for message in answer.messages for entry in message.logprobs]
        assert len(logprobs) == len(case.logprobs)
        assert all(abs(a - b) < 1e-3 for a, b in zip(logprobs, case.logprobs, strict=True))
        usage = answer.finish.usage
        assert (usage.prompt_tokens, usage.output_tokens) == (len(case.request.input.token_ids.ids), len(case.tokens))
        self.counts["answered"] += 1
        self.counts["replayed"] += answer.finish.replays > 0

    async def attempt(self, case: Case) -> Answer:
        """One call. What came of it until it broke must be right, too."""
        answer = Answer()
        call = self.stack.client.call(case.request, 100.0)
        try:
            async for message in call:
                answer.take(message)
                assert answer.token_ids == case.tokens[: len(answer.token_ids)]
        finally:
            call.cancel()
        assert answer.messages
        assert answer.messages[-1].HasField("finish")
        return answer

    async def faults(self) -> None:
        """Kills, freezes and thaws, one after another; freezes overlap with what follows."""
        frozen: set[asyncio.Task[None]] = set()
        try:
            while True:
                await asyncio.sleep(self.chance.uniform(*FAULT_S))
                name = self.chance.choice(NAMES)
                kind = self.chance.choice(("kill", "freeze", "freeze", "freeze for long"))
                pid = int(self.stack.current(name)["pid"])
                self.counts[kind] += 1
                if kind == "kill":
                    send(pid, signal.SIGKILL)
                else:
                    send(pid, signal.SIGSTOP)
                    seconds = self.chance.uniform(0.05, 1.2) if kind == "freeze" else self.chance.uniform(2.5, 6)
                    frozen.add(asyncio.create_task(thaw(pid, seconds)))
        finally:
            for task in frozen:
                task.cancel()
            await asyncio.gather(*frozen, return_exceptions=True)


def send(pid: int, number: signal.Signals) -> None:
    """It may be gone already, and its place not yet taken."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


async def thaw(pid: int, seconds: float) -> None:
    """Lets it go on, then or when all is over."""
    try:
        await asyncio.sleep(seconds)
    finally:
        send(pid, signal.SIGCONT)


def _cut_off(error: grpc.aio.AioRpcError) -> bool:
    """gRPC's words for a connection that broke within a message."""
    return error.code() in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN) and "RST_STREAM" in str(error.details())
