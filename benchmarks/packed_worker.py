"""A stand-in for a worker that costs next to nothing: the worker API, a packed message a step, tokens of a text."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from itertools import islice
from typing import Any, TypeAlias

import grpc.aio

from twostroke.services.grpc_setup import bind, create_server
from twostroke.services.identity import draw_identity
from twostroke.v1 import worker_pb2 as pb
from twostroke.v1 import worker_pb2_grpc

FIRST_NUMBER = 10  # of a prompt token that names a stream; those below are special ones
PAGES = 1 << 20
BEAT_S = 1.0
MOST_TOKENS = 1 << 20


class GatewaySession:
    """What runs for one gateway. A sequence is named by the first token of its prompt, its stream's number."""

    def __init__(self, context: Any, texts: list[int], sent: dict[int, list[float]]) -> None:
        """`texts`: token ids that every output goes round in. `sent`: by stream, when each token was sent, by
        `time.perf_counter()`."""
        self._context = context
        self._texts = texts
        self._turn = asyncio.Lock()  # gRPC takes one write at a time
        self._steps = 0
        self._sent = sent
        self.streams: dict[int, int] = {}  # by the gateway's number of a request
        self.made: dict[int, int] = {}  # tokens so far, by the same
        self.arrived = asyncio.Event()

    def receive(self, message: pb.ToWorker) -> None:
        """Takes sequences in and drops them."""
        match message.WhichOneof("kind"):
            case "submit":
                stream = message.submit.prompt_ids[0] - FIRST_NUMBER
                self.streams[message.submit.request] = stream
                self.made[message.submit.request] = 0
                self._sent[stream] = []
            case "cancel":
                for request in message.cancel.requests:
                    self.streams.pop(request, None)
                    self.made.pop(request, None)
        self.arrived.set()

    async def step(self, tokens: int = 1, *, keep_times: bool = False) -> None:
        """Sends so many tokens of every sequence, in one message."""
        message = pb.FromWorker()
        packed = message.step
        requests = list(self.streams)
        self._steps += 1
        packed.step = self._steps
        packed.requests.extend(requests)
        packed.samples.extend([0] * len(requests))
        packed.attempts.extend([0] * len(requests))
        packed.first_indices.extend([self.made[request] for request in requests])
        packed.counts.extend([tokens] * len(requests))
        packed.finishes.extend([0] * len(requests))
        start = self._steps % len(self._texts)
        packed.token_ids.extend([*islice(self._texts + self._texts, start, start + tokens)] * len(requests))
        if keep_times:
            now = time.perf_counter()
            for request in requests:
                self._sent[self.streams[request]] += [now] * tokens
        for request in requests:
            self.made[request] += tokens
        await self.write(message)

    async def write(self, message: pb.FromWorker) -> None:
        """One at a time."""
        async with self._turn:
            await self._context.write(message)

    async def beat(self) -> None:
        """Signs of life."""
        while True:
            await asyncio.sleep(BEAT_S)
            status = pb.Status(free_pages=PAGES, pages=PAGES, running=len(self.streams))
            await self.write(pb.FromWorker(status=status))


Drive: TypeAlias = Callable[[GatewaySession], Coroutine[Any, Any, None]]


class PackedWorker(worker_pb2_grpc.WorkerServicer):
    """Serves the processes of a gateway."""

    def __init__(self, name: str, model: str, texts: Sequence[int], drive: Drive | None = None) -> None:
        """`texts`: token ids that every output goes round in. `drive` makes a session step; None: `step` does."""
        self._name, self._model = name, model
        self._texts = list(texts)
        self._drive = drive
        self._server: grpc.aio.Server | None = None
        self._sessions: list[GatewaySession] = []
        self.sent: dict[int, list[float]] = {}  # by stream: when each token was sent, by time.perf_counter()
        self.keeps_times = False

    async def start(self) -> str:
        """Serves; returns host:port."""
        self._server = create_server()
        worker_pb2_grpc.add_WorkerServicer_to_server(self, self._server)
        self.address = bind(self._server, "127.0.0.1:0")
        await self._server.start()
        return self.address

    async def stop(self) -> None:
        """Goes away."""
        if self._server is not None:
            await self._server.stop(None)

    @property
    def streams(self) -> int:
        """Sequences that run."""
        return sum(len(session.streams) for session in self._sessions)

    async def step(self, tokens: int = 1) -> None:
        """One for every gateway process."""
        for session in self._sessions:
            await session.step(tokens, keep_times=self.keeps_times)

    async def Session(  # type: ignore[override]  # noqa: N802
        self, request_iterator: AsyncIterator[pb.ToWorker], context: Any
    ) -> None:
        await anext(request_iterator)
        await context.write(pb.FromWorker(hello=self._hello()))
        session = GatewaySession(context, self._texts, self.sent)
        self._sessions.append(session)
        work = [session.beat()] if self._drive is None else [session.beat(), self._drive(session)]
        tasks = [asyncio.create_task(each) for each in work]
        try:
            async for message in request_iterator:
                session.receive(message)
        finally:
            self._sessions.remove(session)
            for task in tasks:
                task.cancel()

    def _hello(self) -> pb.WorkerHello:
        form = pb.ModelFormat(model=self._model, kv_dtype="bfloat16", page_size=64, layers=1, kv_heads=1, head_dim=64)
        return pb.WorkerHello(
            identity=draw_identity(self._name, "bench").message(),
            role=pb.ROLE_BOTH,
            format=form,
            address=self.address,
            pages=PAGES,
            max_batch=1 << 14,
            max_tokens=MOST_TOKENS,
        )
