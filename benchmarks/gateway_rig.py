"""A real gateway on one core, stand-in workers and clients in this process, and what makes the workers step."""

import asyncio
import contextlib
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path

import grpc.aio
import psutil
from gateway_streams import Counts, GrpcStreams, SseStreams
from packed_worker import PackedWorker
from pd_stack import CLI

from twostroke.engine.model_files import TEXT_ONLY
from twostroke.engine.models import resolve
from twostroke.engine.tokenizer import Tokenizer
from twostroke.services.supervisor.machine import free_ports
from twostroke.v1 import inference_pb2 as pb
from twostroke.v1 import inference_pb2_grpc as rpc

TEXT = "the gateway on one core and what feeds it on the other so that neither has to wait for long " * 4
TEXT_FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json")
WORKERS, STREAMS, CONNECTIONS = 8, 200, 8
IDLE_CONNECTIONS = 100
START_S = 60.0


def model_directory(directory: Path) -> Path:
    """The demo model's tokenizer, and a context in which no stream ends."""
    source = resolve("smollm2-135m", parts=TEXT_ONLY)
    for name in TEXT_FILES:
        shutil.copy(source / name, directory / name)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 1 << 20}))
    return directory


@contextlib.contextmanager
def process(core: int, log: Path, *words: str) -> Iterator[subprocess.Popen[bytes]]:
    """Python with these words, on one core; ends with the block."""
    with log.open("ab") as file:
        started = subprocess.Popen([sys.executable, *words], stdout=subprocess.PIPE, stderr=file)
        os.sched_setaffinity(started.pid, {core})  # before it has threads; gRPC here would not survive code in a fork
        try:
            yield started
        finally:
            started.terminate()
            try:
                started.wait(20)
            except subprocess.TimeoutExpired:
                started.kill()
                started.wait()


def cpu_of(pid: int) -> Callable[[], float]:
    """CPU seconds of a process and its threads so far."""
    process = psutil.Process(pid)
    return lambda: sum(process.cpu_times()[:2])


class Rig:
    """A gateway with its workers."""

    def __init__(self, core: int, folder: Path) -> None:
        self._core = core
        self._folder = folder
        self.model = model_directory(folder)
        self.tokens = Tokenizer.from_dir(self.model).encode(TEXT)
        self.http = ""

    @contextlib.asynccontextmanager
    async def running(self, workers: int) -> AsyncIterator[tuple[str, Callable[[], float], psutil.Process]]:
        """(address, CPU seconds so far, process); `self.workers` are met."""
        self.workers = [PackedWorker(f"worker-{i}", self.model.name, self.tokens) for i in range(workers)]
        addresses = [await worker.start() for worker in self.workers]
        ports = free_ports(2)
        address, self.http = (f"127.0.0.1:{port}" for port in ports)
        flags = ("--listen", address, "--http-listen", self.http, "--model", str(self.model))
        more = ("--workers", ",".join(addresses), "--max-queue", "20000", "--routing", "load", "--log-level", "warning")
        with process(self._core, self._folder / "gateway.log", *CLI, "gateway", *flags, *more) as gateway:
            try:
                await self._ready(address, workers)
                yield address, cpu_of(gateway.pid), psutil.Process(gateway.pid)
            finally:
                for worker in self.workers:
                    await worker.stop()

    async def _ready(self, address: str, workers: int) -> None:
        until = time.monotonic() + START_S
        async with grpc.aio.insecure_channel(address) as channel:
            stub = rpc.InferenceStub(channel)
            while True:
                with contextlib.suppress(grpc.aio.AioRpcError):
                    told = await stub.GetModel(pb.GetModelRequest(), timeout=2, wait_for_ready=True)
                    if told.decode_workers == workers:
                        return
                if time.monotonic() > until:
                    raise RuntimeError((self._folder / "gateway.log").read_text()[-3000:])
                await asyncio.sleep(0.1)

    async def arrived(self, streams: int, counts: Counts | None = None) -> None:
        """Until all workers together have so many sequences."""
        async with asyncio.timeout(START_S):
            while sum(worker.streams for worker in self.workers) != streams:
                if counts is not None and counts.failure:
                    raise RuntimeError(f"a stream ended: {counts.failure}")
                await asyncio.sleep(0.05)

    @contextlib.asynccontextmanager
    async def grpc_streams(self, address: str, streams: int = STREAMS) -> AsyncIterator[GrpcStreams]:
        """Open streams, of which the workers know."""
        clients = GrpcStreams(address)
        try:
            await clients.open(range(streams), CONNECTIONS if streams <= STREAMS else IDLE_CONNECTIONS)
            await self.arrived(streams, clients.counts)
            yield clients
        finally:
            clients.close()
            await self.arrived(0)

    @contextlib.asynccontextmanager
    async def sse_streams(self, streams: int = STREAMS) -> AsyncIterator[SseStreams]:
        """The same over HTTP."""
        clients = SseStreams(self.http)
        try:
            await clients.open(range(streams))
            await self.arrived(streams, clients.counts)
            yield clients
        finally:
            clients.close()
            await self.arrived(0)


class Feed:
    """Makes workers step for the time of a `with` block."""

    def __init__(self, workers: Sequence[PackedWorker], counts: Counts, ahead: int | None, pause_s: float = 0) -> None:
        """`ahead`: steps that a worker may be before the slowest of its streams; None: it steps each `pause_s`."""
        self._workers = workers
        self._counts = counts
        self._ahead = ahead
        self._pause_s = pause_s
        self._moved = [asyncio.Event() for _ in workers]
        self._steps = [0 for _ in workers]
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> None:
        owner = {stream: index for index, worker in enumerate(self._workers) for stream in worker.sent}
        behind = [0 for _ in self._workers]  # tokens that a worker's streams have not got
        self._behind = behind

        def got(stream: int, _: int, tokens: int) -> None:
            index = owner[stream]
            behind[index] -= tokens
            self._moved[index].set()

        if self._ahead is not None:
            self._counts.on_message = got
        for index, worker in enumerate(self._workers):
            work = self._chased(index, worker) if self._ahead is not None else self._paced(worker)
            self._tasks.append(asyncio.create_task(work))

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        done = await asyncio.gather(*self._tasks, return_exceptions=True)
        for each in done:
            if isinstance(each, Exception):
                raise each
        if self._counts.failure:
            raise RuntimeError(f"a stream ended: {self._counts.failure}")

    async def _chased(self, index: int, worker: PackedWorker) -> None:
        moved = self._moved[index]
        while True:
            while self._behind[index] > (self._ahead or 0) * worker.streams - worker.streams:
                moved.clear()
                await moved.wait()
            self._behind[index] += worker.streams
            await worker.step()

    async def _paced(self, worker: PackedWorker) -> None:
        at = time.perf_counter() + random.uniform(0, self._pause_s)
        while True:
            await asyncio.sleep(max(0.0, at - time.perf_counter()))
            await worker.step()
            at += self._pause_s * random.uniform(0.9, 1.1)
