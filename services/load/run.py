"""Drives a load against a gateway: so many requests at once, or so many a second whatever the answers do."""

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import grpc.aio

from ...v1 import inference_pb2 as pb
from .plan import LoadPlan, PlannedRequest
from .record import CANCELLED, NOT_SENT, OK, Record
from .tally import Tally

MESSAGE = 200  # characters of an error that are kept


class Starter(Protocol):
    """What is used of `services.client.Client`."""

    def start(
        self, request: pb.GenerateRequest, timeout_s: float | None
    ) -> grpc.aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateResponse]:
        """A call that has begun."""


@dataclass(frozen=True, slots=True)
class Options:
    """How requests are made and when the run ends: whichever comes first. After that, what runs may finish."""

    model: str = ""
    temperature: float = 0.0
    ignore_eos: bool = True
    priority: int = 0
    timeout_s: float | None = None  # of a request
    requests: int | None = None
    duration_s: float | None = None
    max_in_flight: int = 8192  # with a rate: what the client is to hold


class LoadRun:
    """One run; `tally` grows while it goes on. Make it and use it on one loop."""

    def __init__(
        self, client: Starter, plan: LoadPlan, options: Options, on_end: Callable[[Record], None] = lambda _: None
    ) -> None:
        """`on_end` is told of each request of the run, but not of warm-up."""
        self._client, self._plan, self._options, self._on_end = client, plan, options, on_end
        self.tally = Tally()
        self.running = 0
        self.started = 0.0
        self._stopped = False
        self._tasks: set[asyncio.Task[None]] = set()

    def stop(self) -> None:
        """Ends the run early: what is under way is cancelled and not counted."""
        self._stopped, self.tally.complete = True, False
        for task in self._tasks:
            task.cancel()

    async def warm_up(self, count: int, concurrency: int) -> Tally:
        """Runs `count` requests that are not of the load; returns what became of them."""
        tally, numbers = Tally(), iter(range(count))

        async def slot() -> None:
            for number in numbers:
                await self._one(self._plan.request(number, warm_up=True), Record(number), tally)

        await self._all([slot() for _ in range(min(count, concurrency))])
        return tally

    async def closed(self, concurrency: int) -> None:
        """Keeps `concurrency` requests running: each slot sends its next one when its last one has ended."""
        self.started = time.monotonic()
        numbers = self._numbers()

        async def slot() -> None:
            for number in numbers:
                await self._measured(self._plan.request(number), None)

        await self._all([slot() for _ in range(concurrency)])

    async def open(self, rate: float) -> None:
        """Sends by the plan's arrival times, `rate` a second on average, however slow the answers are."""
        self.started = time.monotonic()
        await self._all([self._arrive(rate)])

    async def _arrive(self, rate: float) -> None:
        for number, offset in zip(self._numbers(), self._plan.arrivals(rate), strict=False):
            if self._options.duration_s is not None and offset >= self._options.duration_s:
                return
            planned = self._plan.request(number)  # made before its time comes
            scheduled = self.started + offset
            await asyncio.sleep(max(0.0, scheduled - time.monotonic()))
            if self.running >= self._options.max_in_flight:
                self._refuse(planned, scheduled)
            else:
                self._spawn(self._measured(planned, scheduled))

    def _numbers(self) -> Iterator[int]:
        """Of the requests to send; ends with the run."""
        number, options = 0, self._options
        while not self._stopped and (options.requests is None or number < options.requests):
            if options.duration_s is not None and time.monotonic() - self.started >= options.duration_s:
                return
            yield number
            number += 1

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        """A fault of the client itself ends the run; `_all` raises it."""
        if task.cancelled() or task.exception() is None:
            self._tasks.discard(task)
        else:
            self.stop()

    async def _all(self, work: list[Coroutine[Any, Any, None]]) -> None:
        """Runs it and what it spawns to the end; raises the first exception that is not a cancel by `stop`."""
        for each in work:
            self._spawn(each)
        try:
            while waiting := {task for task in self._tasks if not task.done()}:
                await asyncio.wait(waiting)
        finally:
            for task in self._tasks:
                task.cancel()
        for task in self._tasks:
            if not task.cancelled():  # its `_done` may not have been called yet
                task.result()

    async def _measured(self, planned: PlannedRequest, scheduled: float | None) -> None:
        await self._one(planned, record := Record(planned.index, scheduled, cut=planned.cut), self.tally)
        self._on_end(record)

    def _refuse(self, planned: PlannedRequest, scheduled: float) -> None:
        now = time.monotonic()
        record = Record(planned.index, scheduled, sent=now)
        record.end(NOT_SENT, now, f"{self.running} requests were in flight")
        self.tally.add(record)
        self._on_end(record)

    async def _one(self, planned: PlannedRequest, record: Record, tally: Tally) -> None:
        """Sends one request, reads its answer, counts it. Raises nothing but CancelledError."""
        message = self._message(planned)
        self.running += 1
        record.sent = time.monotonic()
        tally.sending(record)
        call = self._client.start(message, self._options.timeout_s)
        try:
            async for piece in call:
                record.take(piece, time.monotonic())
            record.end(OK, time.monotonic())
        except grpc.aio.AioRpcError as error:
            record.end(error.code().name, time.monotonic(), (error.details() or "")[:MESSAGE])
        except asyncio.CancelledError:
            record.end(CANCELLED, time.monotonic())
            raise
        finally:
            self.running -= 1
            call.cancel()
            tally.add(record)

    def _message(self, planned: PlannedRequest) -> pb.GenerateRequest:
        options = self._options
        return pb.GenerateRequest(
            model=options.model,
            priority=options.priority,
            input=pb.Input(token_ids=pb.TokenIds(ids=planned.prompt)),
            sampling=pb.Sampling(temperature=options.temperature, seed=planned.seed),
            stopping=pb.Stopping(max_tokens=planned.max_tokens, ignore_eos=options.ignore_eos),
        )
