"""A soak: random requests against a stack whose processes are killed and frozen at random. All of it from one seed.

Clients of a gateway that died, or had nobody to serve them, begin anew; whatever comes is compared with the fault-free
output token by token, also where a stream was cut short.
"""

import asyncio
import contextlib
import os
import random
import signal
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import grpc
import grpc.aio

from twostroke.services.grpc_setup import open_channel
from twostroke.v1 import worker_pb2

from .harness import Answer, Client, Stack
from .soak_work import Expected, Task

OPEN = 48  # streams at once, at most
STUCK_S = 120.0  # a try that takes longer hangs
SETTLE_S = 300.0  # for all that is open when the faults end
STATUS_S = 2.0  # between two looks at what workers tell of themselves
AGAIN = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED)
Kind = Literal["kill", "short freeze", "long freeze", "freeze for good"]
KINDS: tuple[Kind, ...] = ("kill", "short freeze", "long freeze", "freeze for good")
Fate = Literal["finish", "tokens", "time", "deadline"]
DECK: tuple[tuple[Kind, str], ...] = (
    *((kind, role) for kind in KINDS for role in ("prefill", "decode", "gateway")),
    *((kind, role) for kind in KINDS for role in ("prefill", "decode")),
    ("kill", "decode"),
    ("short freeze", "supervisor"),
    ("long freeze", "supervisor"),
)


@dataclass(eq=False)
class Stream:
    """A client's request, over all of its tries."""

    number: int
    task: int
    fate: Fate
    amount: float  # tokens or seconds, by the fate
    tries: int = 0
    replays: int = 0
    end: str = ""  # finished, cancelled, deadline; else what is wrong


@dataclass
class Fault:
    """Something done to a process; `streams` were open."""

    kind: Kind
    role: str
    streams: list[Stream]


@dataclass
class Soak:
    """`run` it once; then `problems` and `faults` tell."""

    stack: Stack
    tasks: Sequence[Task]
    expected: Sequence[Sequence[Expected]]
    seed: int
    pause_s: tuple[float, float] = (0.5, 4.5)  # between two faults
    fenced_s: float = 60.0  # a process that is frozen for good must have been ended by then
    arrivals_a_second: float = 8.0
    problems: list[str] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    ended: list[Stream] = field(default_factory=list)
    tokens: int = 0
    again: Counter[str] = field(default_factory=Counter)  # why clients began anew
    figures: dict[tuple[str, int], worker_pb2.Status] = field(default_factory=dict)  # the last, by worker and pid
    _open: set[Stream] = field(default_factory=set)
    _freezes: Counter[int] = field(default_factory=Counter)  # under way, by pid

    async def run(self, seconds: float) -> None:
        """Load and faults for so long; then every stream must end, and every worker be back."""
        stop = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._arrivals(group, stop))
            faults = group.create_task(self._strike(seconds))
            group.create_task(self._watch(stop))
            await faults
            stop.set()
            settled = asyncio.get_running_loop().call_later(SETTLE_S, self._stuck)
        settled.cancel()
        await self.stack.joined(prefill=2, decode=2)

    def _stuck(self) -> None:
        raise RuntimeError(f"streams are open after {SETTLE_S} s: {[vars(stream) for stream in self._open]}")

    # Clients

    async def _arrivals(self, group: asyncio.TaskGroup, stop: asyncio.Event) -> None:
        chance, gate = random.Random(f"arrivals {self.seed}"), asyncio.Semaphore(OPEN)
        number = 0
        while not stop.is_set():
            await gate.acquire()
            number += 1
            stream = self._draw(chance, number)
            group.create_task(self._live(stream, random.Random(f"{self.seed} {number}"))).add_done_callback(
                lambda _: gate.release()
            )
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), chance.expovariate(self.arrivals_a_second))

    def _draw(self, chance: random.Random, number: int) -> Stream:
        task = chance.randrange(len(self.tasks))
        fate: Fate = chance.choices(("finish", "tokens", "time", "deadline"), (70, 10, 10, 10))[0]
        longest = self.tasks[task].params.max_tokens
        amount = {"finish": 0.0, "tokens": chance.randint(0, longest), "time": 4 * chance.random() ** 2}
        return Stream(number, task, fate, amount.get(fate, 0.01 + 4 * chance.random() ** 2))

    async def _live(self, stream: Stream, chance: random.Random) -> None:
        self._open.add(stream)
        try:
            while not stream.end:
                stream.tries += 1
                await self._try(stream)
                if not stream.end:
                    await asyncio.sleep(chance.uniform(0.1, 0.8))
        finally:
            self._open.discard(stream)
            self.ended.append(stream)

    async def _try(self, stream: Stream) -> None:
        """One call. Sets how the stream ended, unless it has to be tried again."""
        answers = [Answer() for _ in range(self.tasks[stream.task].samples)]
        channel = open_channel(self.stack.address)
        limit = stream.amount if stream.fate == "time" else STUCK_S
        try:
            async with asyncio.timeout(limit):
                stream.end = await self._read(stream, Client(channel), answers)
        except TimeoutError:
            stream.end = "cancelled" if stream.fate == "time" else f"nothing ended it in {STUCK_S} s"
        except grpc.aio.AioRpcError as error:
            self._note(stream, error)
        except AssertionError as error:
            stream.end = f"indices: {error}"
        finally:
            await channel.close()
        self._compare(stream, answers)

    async def _read(self, stream: Stream, client: Client, answers: Sequence[Answer]) -> str:
        task, most = self.tasks[stream.task], stream.amount if stream.fate == "tokens" else float("inf")
        call = client.call(task.message(), timeout=stream.amount if stream.fate == "deadline" else None)
        try:
            if most == 0:
                return "cancelled"
            async for message in call:
                answers[message.sample].take(message)
                self.tokens += len(message.token_ids)
                if message.HasField("finish"):
                    stream.replays = max(stream.replays, message.finish.replays)
                if sum(len(answer.token_ids) for answer in answers) >= most:
                    return "cancelled"
        finally:
            call.cancel()
        whole = all(answer.messages and answer.messages[-1].HasField("finish") for answer in answers)
        return "finished" if whole else "ended without a finish"

    def _note(self, stream: Stream, error: grpc.aio.AioRpcError) -> None:
        code = error.code()
        if code in AGAIN or _cut_off(error):
            self.again[f"{code.name}: {reason(error.details() or '')}"] += 1
        elif code is grpc.StatusCode.DEADLINE_EXCEEDED and stream.fate == "deadline":
            stream.end = "deadline"
        else:
            stream.end = f"{code.name}: {error.details()}"

    def _compare(self, stream: Stream, answers: Sequence[Answer]) -> None:
        for sample, (answer, expected) in enumerate(zip(answers, self.expected[stream.task], strict=True)):
            if wrong := expected.departure(answer):
                stream.end = f"sample {sample}: {wrong}"
        if stream.end not in ("", "finished", "cancelled", "deadline"):
            self.problems.append(f"seed {self.seed}: {vars(stream)}")

    # Faults

    async def _strike(self, seconds: float) -> None:
        chance, thaws = random.Random(f"faults {self.seed}"), set[asyncio.Task[None]]()
        cards = dealt(chance)
        try:
            async with asyncio.timeout(seconds):
                while True:
                    await asyncio.sleep(chance.uniform(*self.pause_s))
                    kind, role = next(cards)
                    name = role if role in ("gateway", "supervisor") else f"{role}-{chance.randrange(2)}"
                    thaws.add(asyncio.create_task(self._hit(kind, name, chance.random())))
        except TimeoutError:
            pass
        await asyncio.gather(*thaws)

    async def _hit(self, kind: Kind, name: str, fraction: float) -> None:
        """A process that is gone at the moment is spared."""
        pid = self._pid(name)
        process = _handle(pid)
        if process is None:
            return
        try:
            self.faults.append(Fault(kind, name.rstrip("-01"), list(self._open)))
            if kind == "kill":
                signal.pidfd_send_signal(process, signal.SIGKILL)
                return
            seconds = {"short freeze": 0.1 + fraction, "long freeze": 2.5 + 4 * fraction}.get(kind, self.fenced_s)
            if not await self._frozen(pid, process, seconds) and kind == "freeze for good":
                self.problems.append(f"seed {self.seed}: {name} was frozen for {seconds} s and nobody ended it")
        except ProcessLookupError:  # it is gone since
            pass
        finally:
            os.close(process)

    async def _frozen(self, pid: int, process: int, seconds: float) -> bool:
        """Freezes it for so long; whether it ends meanwhile. The last of several freezes thaws it, not the first."""
        self._freezes[pid] += 1
        try:
            signal.pidfd_send_signal(process, signal.SIGSTOP)
            return await _gone(process, seconds)
        finally:
            self._freezes[pid] -= 1
            if not self._freezes[pid]:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(process, signal.SIGCONT)

    def _pid(self, name: str) -> int:
        """Of a process that runs, as far as the supervisor told; else 0."""
        if name == "supervisor":
            return self.stack.process.pid
        last = next(e for e in reversed(self.stack.events) if e.get("name") == name)
        return 0 if last["event"] in ("exited", "restarting") else int(self.stack.current(name)["pid"])

    # Workers

    async def _watch(self, stop: asyncio.Event) -> None:
        """Keeps what workers tell of themselves: those that are killed tell nothing later."""
        while not stop.is_set():
            for name in self.stack.workers():
                pid = int(self.stack.current(name)["pid"])
                with contextlib.suppress(TimeoutError, OSError, AssertionError, grpc.aio.AioRpcError):
                    async with asyncio.timeout(STATUS_S):
                        self.figures[name, pid] = await self.stack.status(name)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), STATUS_S)

    def total(self, figure: str) -> int:
        """Of all workers that there were, as far as they came to tell."""
        return sum(int(getattr(status, figure)) for status in self.figures.values())

    def transports(self) -> set[str]:
        """By which KV went."""
        return {pair.transport for status in self.figures.values() for pair in status.pairs}

    # What came of it

    def report(self) -> str:
        """Counts: how streams ended, and for each kind of fault how often it struck and what it did to streams."""
        ends = Counter(stream.end for stream in self.ended)
        lines = [
            f"soak, seed {self.seed}: {len(self.ended)} streams, {self.tokens} tokens; "
            + ", ".join(f"{count} {end}" for end, count in ends.most_common(4)),
            f"{sum(stream.replays > 0 for stream in self.ended)} streams were replayed "
            f"({sum(stream.replays for stream in self.ended)} replays), clients began anew {self.again.total()} times:",
            *(f"  {count:5} x {why}" for why, count in self.again.most_common(8)),
            f"KV by {', '.join(sorted(self.transports()))}: {self.total('pushed_pages')} pages, "
            f"{self.total('damaged_pages')} damaged; {self.total('preemptions')} preemptions",
            f"{'fault':32}{'struck':>8}{'streams open':>14}{'of them replayed':>18}{'began anew':>12}",
        ]
        for kind, role in sorted({(fault.kind, fault.role) for fault in self.faults}):
            struck = [fault for fault in self.faults if (fault.kind, fault.role) == (kind, role)]
            met = {stream for fault in struck for stream in fault.streams}
            replayed, anew = sum(stream.replays > 0 for stream in met), sum(stream.tries > 1 for stream in met)
            lines.append(f"{kind + ', ' + role:32}{len(struck):8}{len(met):14}{replayed:18}{anew:12}")
        return "\n".join(lines)


def _cut_off(error: grpc.aio.AioRpcError) -> bool:
    """gRPC's words for a connection that broke within a message."""
    return error.code() in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN) and "RST_STREAM" in str(error.details())


def reason(details: str) -> str:
    """The kind of a status' details, so that they can be counted."""
    return "attempts are used up" if "(attempt " in details else details.split(":")[0][:60]


def dealt(chance: random.Random) -> Iterator[tuple[Kind, str]]:
    """The whole deck, shuffled, again and again: every fault comes as often as any other."""
    while True:
        yield from chance.sample(DECK, len(DECK))


def _handle(pid: int) -> int | None:
    """A pidfd; None where the process is gone."""
    try:
        process = os.pidfd_open(pid) if pid else None
        return process if b"twostroke" in Path(f"/proc/{pid}/cmdline").read_bytes() else None
    except (ProcessLookupError, FileNotFoundError):
        return None


async def _gone(process: int, seconds: float) -> bool:
    """Whether the process of a pidfd ends within this time."""
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(process, ended.set)
    try:
        await asyncio.wait_for(ended.wait(), seconds)
    except TimeoutError:
        return False
    finally:
        loop.remove_reader(process)
    return True
