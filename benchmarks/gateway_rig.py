"""A real gateway on one core, stand-in workers and clients in this process, and what makes the workers step."""

import asyncio
import contextlib
import os
import random
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Sequence
from pathlib import Path

import grpc.aio
import psutil
from gateway_model import make_model
from gateway_streams import Counts, GrpcStreams, SseStreams
from packed_worker import PackedWorker
from pd_stack import CLI

from twostroke.services.supervisor.machine import free_ports
from twostroke.v1 import inference_pb2 as pb
from twostroke.v1 import inference_pb2_grpc as rpc

WORKERS, STREAMS, CONNECTIONS = 8, 200, 8
IDLE_CONNECTIONS = 100
START_S = 60.0


@contextlib.contextmanager
def process(cores: Collection[int], log: Path, *words: str) -> Iterator[subprocess.Popen[bytes]]:
    """Python with these words, on these cores; ends with the block."""
    with log.open("ab") as file:
        started = subprocess.Popen([sys.executable, *words], stdout=subprocess.PIPE, stderr=file)
        os.sched_setaffinity(started.pid, cores)  # before it has threads; gRPC here would not survive code in a fork
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
    """CPU seconds of a process, its threads and its children so far."""
    own = psutil.Process(pid)
    return lambda: sum(sum(each.cpu_times()[:2]) for each in (own, *own.children(recursive=True)))


@contextlib.contextmanager
def gateway_process(
    cores: Collection[int], folder: Path, model: Path, workers: Sequence[str], processes: int = 1
) -> Iterator[tuple[str, str, int]]:
    """(gRPC address, HTTP address, process id) of a gateway."""
    address, http = (f"127.0.0.1:{port}" for port in free_ports(2))
    words = (*CLI, "gateway", "--listen", address, "--http-listen", http, "--model", str(model))
    words += ("--workers", ",".join(workers), "--max-queue", "20000", "--routing", "load", "--log-level", "warning")
    with process(cores, folder / "gateway.log", *words, "--processes", str(processes)) as gateway:
        yield address, http, gateway.pid


async def ready(address: str, workers: int, folder: Path) -> None:
    """Until a gateway process knows all of its workers."""
    until = time.monotonic() + START_S
    async with grpc.aio.insecure_channel(address) as channel:
        stub = rpc.InferenceStub(channel)
        while True:
            with contextlib.suppress(grpc.aio.AioRpcError):
                told = await stub.GetModel(pb.GetModelRequest(), timeout=2, wait_for_ready=True)
                if told.decode_workers == workers:
                    return
            if time.monotonic() > until:
                raise RuntimeError((folder / "gateway.log").read_text()[-3000:])
            await asyncio.sleep(0.1)


class Rig:
    """A gateway with its workers."""

    def __init__(self, core: int, folder: Path) -> None:
        self._core = core
        self._folder = folder
        self.model = folder
        self.tokens = make_model(folder)
        self.http = ""

    @contextlib.asynccontextmanager
    async def running(self, workers: int) -> AsyncIterator[tuple[str, Callable[[], float], psutil.Process]]:
        """(address, CPU seconds so far, process); `self.workers` are met."""
        self.workers = [PackedWorker(f"worker-{i}", self.model.name, self.tokens) for i in range(workers)]
        addresses = [await worker.start() for worker in self.workers]
        with gateway_process({self._core}, self._folder, self.model, addresses) as (address, self.http, pid):
            try:
                await ready(address, workers, self._folder)
                yield address, cpu_of(pid), psutil.Process(pid)
            finally:
                for worker in self.workers:
                    await worker.stop()

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
