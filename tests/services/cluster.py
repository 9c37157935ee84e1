"""A real gateway in front of stand-in workers, on loopback, in the test's own loop."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from twostroke.services.gateway.gateway import Gateway, load_model
from twostroke.services.grpc_setup import open_channel
from twostroke.services.settings import GatewaySettings
from twostroke.v1 import inference_pb2 as pb
from twostroke.v1 import inference_pb2_grpc

from .stand_in_worker import StandIn

PATIENCE_S = 20.0
DEADLINES_S = (0.3, 2.0, 8.0, 20.0)  # tried one after the other


async def until(condition: Callable[[], object]) -> None:
    """Returns when it holds; fails after PATIENCE_S."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.005)


class Cluster:
    """A gateway, a client's stub and the workers."""

    def __init__(self, gateway: Gateway, address: str, channel: grpc.aio.Channel, workers: Sequence[StandIn]) -> None:
        self.gateway, self.address, self.channel, self.workers = gateway, address, channel, workers
        self.stub = inference_pb2_grpc.InferenceStub(channel)

    def worker(self, name: str) -> StandIn:
        return next(worker for worker in self.workers if worker.name == name)

    async def ready(self, count: int) -> None:
        """So many workers are connected."""
        await until(lambda: len(self.gateway.fleet.loads()) == count)

    async def collect(self, request: pb.GenerateRequest, **options: Any) -> list[pb.GenerateResponse]:
        return [piece async for piece in self.stub.Generate(request, **options)]

    async def idle(self) -> None:
        """Nobody holds anything of a request: no place, no queue, no sequence at any worker."""
        await until(lambda: self.gateway.admission.inside == 0)
        for load in self.gateway.fleet.loads():
            assert self.gateway.fleet.session(load.incarnation).waiting == 0
        await until(lambda: not any(worker.live for worker in self.workers))


@asynccontextmanager
async def cluster(
    model_dir: Path, *workers: StandIn, connected: int | None = None, **settings: Any
) -> AsyncIterator[Cluster]:
    """Starts the workers, the gateway, and waits until `connected` (all) of them are met; ends all of it."""
    before = asyncio.all_tasks()
    addresses = [await worker.start() for worker in workers]
    chosen = GatewaySettings(model=str(model_dir), listen="127.0.0.1:0", **{"workers": addresses, **settings})
    gateway = Gateway(chosen, load_model(chosen))
    address = await gateway.start()
    try:
        async with open_channel(address) as channel:
            it = Cluster(gateway, address, channel, workers)
            await it.ready(len(workers) if connected is None else connected)
            yield it
    finally:
        await gateway.stop()
        for worker in workers:
            await worker.stop()
    await until(lambda: asyncio.all_tasks() <= before)  # no task is left


def text_request(text: str = "hello", max_tokens: int | None = None, **fields: Any) -> pb.GenerateRequest:
    """A prompt of text."""
    stopping = pb.Stopping() if max_tokens is None else pb.Stopping(max_tokens=max_tokens)
    return pb.GenerateRequest(input=pb.Input(text=text), stopping=stopping, **fields)


def token_ids(pieces: Sequence[pb.GenerateResponse]) -> list[int]:
    """All tokens; fails where an index is missing, doubled or out of order, or `finish` is not in the last alone."""
    tokens: list[int] = []
    for piece in pieces:
        assert piece.first_index == len(tokens)
        tokens += piece.token_ids
    assert [piece.HasField("finish") for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    return tokens


async def refusal(call: Awaitable[Any]) -> grpc.aio.AioRpcError:
    """The error that a call ends with."""
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return error
    raise AssertionError("the call succeeded")


async def failure(call: Any) -> grpc.aio.AioRpcError:
    """The error that a stream ends with, once what came before it is read: its last message says so too, or not."""
    return await refusal(_drained(call))


async def cut_short(
    it: Cluster, start: Callable[[float], Any], tokens: int, there: Callable[[], object]
) -> grpc.aio.AioRpcError:
    """The error of a stream whose deadline comes once so many tokens came, and `there` holds.

    `start`: begins one with this time-out in seconds. Where the machine was too slow for that, one with a longer one.
    """
    for seconds in DEADLINES_S:
        call = start(seconds)
        if await _comes_so_far(call, tokens, there):
            return await failure(call)
        await it.idle()
        for worker in it.workers:
            worker.submits.clear()
    raise AssertionError(f"no stream came so far within {DEADLINES_S[-1]:g} s")


async def _comes_so_far(call: Any, tokens: int, there: Callable[[], object]) -> bool:
    try:
        while tokens > 0:
            tokens -= len((await call.read()).token_ids)
    except grpc.aio.AioRpcError as error:
        if error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
            raise
        return False
    await until(lambda: call.done() or there())
    return bool(there())


async def _drained(call: Any) -> None:
    while await call.read() is not grpc.aio.EOF:
        pass


def detail(error: grpc.aio.AioRpcError, kind: type[Any]) -> Any:
    """A detail of a rich status, or None."""
    status = rpc_status.from_call(error)
    for packed in status.details if status is not None else ():
        message = kind()
        if packed.Unpack(message):
            return message
    return None


def field_of(error: grpc.aio.AioRpcError) -> str:
    """The field that BadRequest names, or empty."""
    bad = detail(error, error_details_pb2.BadRequest)
    return bad.field_violations[0].field if bad is not None else ""


def retry_s(error: grpc.aio.AioRpcError) -> float:
    """RetryInfo's time in seconds, or -1."""
    retry = detail(error, error_details_pb2.RetryInfo)
    return retry.retry_delay.ToMilliseconds() / 1000 if retry is not None else -1.0
