"""A gateway for tests of workers: one session, told what to send, and everything that came on it."""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import grpc

from twostroke.engine.request import FinishReason, SamplingParams, SequenceKey, Work
from twostroke.services.gateway.wire_gateway import make_submit, unpack_step
from twostroke.services.grpc_setup import open_channel
from twostroke.services.identity import PROTOCOL, draw_identity
from twostroke.v1 import worker_pb2 as pb
from twostroke.v1 import worker_pb2_grpc

PEER = pb.Peer(address="127.0.0.1:1", incarnation=99)


Name: TypeAlias = int | tuple[int, int]


def name_of(number: int, sample: int) -> Name:
    """A request's number; of a further sample (number, sample)."""
    return (number, sample) if sample else number


class Gateway:
    """A scripted gateway: one session, everything that came on it."""

    def __init__(self, address: str, *, incarnation: int = 0, model: str = "tiny", protocol: int = PROTOCOL) -> None:
        self.channel = open_channel(address)
        self.call: Any = worker_pb2_grpc.WorkerStub(self.channel).Session()
        identity = draw_identity("gateway", "here").message()
        identity.protocol = protocol
        identity.incarnation = incarnation or identity.incarnation
        self.incarnation = identity.incarnation
        self.hello = pb.ToWorker(hello=pb.GatewayHello(identity=identity, model=model))
        self.tokens: dict[Name, list[int]] = defaultdict(list)
        self.finishes: dict[Name, FinishReason] = {}
        self.failures: dict[Name, pb.Failure] = {}
        self.timings: dict[Name, pb.SequenceTimings] = {}  # the last ones
        self.steps: list[pb.Step] = []
        self.statuses: list[pb.Status] = []
        self.worker_hello: pb.WorkerHello | None = None
        self.changed = asyncio.Event()
        self.reader: asyncio.Task[None] | None = None
        self.writing = asyncio.Lock()

    async def write(self, message: pb.ToWorker) -> None:
        async with self.writing:  # a call takes one write at a time
            await self.call.write(message)

    async def __aenter__(self) -> "Gateway":
        await self.call.write(self.hello)
        first = await self.call.read()
        assert first is not grpc.aio.EOF, await self.call.details()
        self.worker_hello = first.hello
        self.reader = asyncio.create_task(self._read())
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        self.call.cancel()
        if self.reader is not None:
            self.reader.cancel()
            await asyncio.gather(self.reader, return_exceptions=True)
        await self.channel.close()

    async def refusal(self) -> tuple[grpc.StatusCode, str]:
        """Says hello; how the session was refused."""
        try:
            await self.call.write(self.hello)
            while await self.call.read() is not grpc.aio.EOF:
                pass
        except grpc.aio.AioRpcError:
            pass
        return await self.status()

    async def status(self) -> tuple[grpc.StatusCode, str]:
        async with asyncio.timeout(20):
            result = await self.call.code(), await self.call.details()
        await self.channel.close()
        return result

    async def _read(self) -> None:
        try:
            while (message := await self.call.read()) is not grpc.aio.EOF:
                self._note(message)
                self.changed.set()
        except grpc.aio.AioRpcError:
            pass
        finally:
            self.changed.set()

    def _note(self, message: pb.FromWorker) -> None:
        match message.WhichOneof("kind"):
            case "step":
                self.steps.append(message.step)
                requests, samples = message.step.requests, message.step.samples
                for told in message.step.timings:
                    self.timings[name_of(requests[told.sequence], samples[told.sequence])] = told
                for output in unpack_step(message.step, self.incarnation):
                    number = name_of(output.key.request, output.key.sample)
                    assert output.first_index == len(self.tokens[number])
                    self.tokens[number] += [token.token_id for token in output.tokens]
                    if output.finish is not None:
                        assert number not in self.finishes
                        self.finishes[number] = output.finish
            case "failure":
                self.failures[name_of(message.failure.request, message.failure.sample)] = message.failure
            case "status":
                self.statuses.append(message.status)

    def key(self, number: int, attempt: int = 0) -> SequenceKey:
        return SequenceKey(self.incarnation, number, 0, attempt)

    async def submit(
        self,
        number: int,
        prompt: list[int],
        count: int,
        work: Work = Work.ALL,
        *,
        attempt: int = 0,
        peer: pb.Peer = PEER,
        **more: Any,
    ) -> None:
        params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
        other = None if work is Work.ALL else peer
        message = make_submit(self.key(number, attempt), work, prompt, params, peer=other, start_now=True, **more)
        await self.write(pb.ToWorker(submit=message))

    async def cancel(self, *numbers: int, attempt: int = 0, samples: Sequence[int] = ()) -> None:
        attempts = [attempt] * len(numbers)
        await self.write(pb.ToWorker(cancel=pb.Cancel(requests=numbers, attempts=attempts, samples=samples)))

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(30):
            while not condition():
                assert self.reader is not None
                assert not self.reader.done(), f"the session ended: {await self.call.details()}"
                self.changed.clear()
                await self.changed.wait()

    async def finished(self, *numbers: Name) -> None:
        await self.until(lambda: all(n in self.finishes or n in self.failures for n in numbers))
