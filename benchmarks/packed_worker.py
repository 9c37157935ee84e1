"""A stand-in for a worker that costs next to nothing: the worker API, a packed message a step, tokens of a text."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from itertools import islice
from typing import Any

import grpc.aio

from twostroke.services.grpc_setup import bind, create_server
from twostroke.services.identity import draw_identity
from twostroke.v1 import worker_pb2 as pb
from twostroke.v1 import worker_pb2_grpc

FIRST_NUMBER = 10  # of a prompt token that names a stream; those below are special ones
PAGES = 1 << 20
BEAT_S = 1.0
MOST_TOKENS = 1 << 20


class PackedWorker(worker_pb2_grpc.WorkerServicer):
    """Serves one gateway. A sequence is named by the first token of its prompt, its stream's number."""

    def __init__(self, name: str, model: str, texts: Sequence[int]) -> None:
        """`texts`: token ids that every output goes round in."""
        self._name, self._model = name, model
        self._texts = list(texts)
        self._server: grpc.aio.Server | None = None
        self._context: Any = None
        self._requests: dict[int, int] = {}  # the gateway's number of a request: the stream's
        self._made: dict[int, int] = {}  # tokens so far, by the gateway's number
        self._steps = 0
        self._turn = asyncio.Lock()  # gRPC takes one write at a time
        self._arrived = asyncio.Event()
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
        return len(self._requests)

    async def until(self, streams: int) -> None:
        """Waits for so many sequences."""
        while len(self._requests) != streams:
            self._arrived.clear()
            await self._arrived.wait()

    async def Session(  # type: ignore[override]  # noqa: N802
        self, request_iterator: AsyncIterator[pb.ToWorker], context: Any
    ) -> None:
        await anext(request_iterator)
        await context.write(pb.FromWorker(hello=self._hello()))
        self._context = context
        beats = asyncio.create_task(self._beat())
        try:
            async for message in request_iterator:
                self._receive(message)
        finally:
            beats.cancel()

    async def step(self, tokens: int = 1) -> int:
        """Sends so many tokens of every sequence, in one message; how many these are in all."""
        message = pb.FromWorker()
        packed = message.step
        requests = list(self._requests)
        self._steps += 1
        packed.step = self._steps
        packed.requests.extend(requests)
        packed.samples.extend([0] * len(requests))
        packed.attempts.extend([0] * len(requests))
        packed.first_indices.extend([self._made[request] for request in requests])
        packed.counts.extend([tokens] * len(requests))
        packed.finishes.extend([0] * len(requests))
        start = self._steps % len(self._texts)
        packed.token_ids.extend([*islice(self._texts + self._texts, start, start + tokens)] * len(requests))
        if self.keeps_times:
            now = time.perf_counter()
            for request in requests:
                self.sent[self._requests[request]] += [now] * tokens
        for request in requests:
            self._made[request] += tokens
        await self._write(message)
        return tokens * len(requests)

    def _receive(self, message: pb.ToWorker) -> None:
        match message.WhichOneof("kind"):
            case "submit":
                stream = message.submit.prompt_ids[0] - FIRST_NUMBER
                self._requests[message.submit.request] = stream
                self._made[message.submit.request] = 0
                self.sent[stream] = []
            case "cancel":
                for request in message.cancel.requests:
                    self._requests.pop(request, None)
                    self._made.pop(request, None)
        self._arrived.set()

    async def _write(self, message: pb.FromWorker) -> None:
        async with self._turn:
            await self._context.write(message)

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(BEAT_S)
            status = pb.Status(free_pages=PAGES, pages=PAGES, running=len(self._requests))
            await self._write(pb.FromWorker(status=status))

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
