"""A real stack of processes for the end-to-end tests, a client of it, and a look into its workers' pools."""

import asyncio
import contextlib
import json
import os
import secrets
import signal
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import grpc.aio

from twostroke.services.grpc_setup import open_channel
from twostroke.services.identity import PROTOCOL
from twostroke.v1 import inference_pb2 as pb
from twostroke.v1 import inference_pb2_grpc as rpc
from twostroke.v1 import worker_pb2, worker_pb2_grpc

START_S = 90.0
WHOLE_S = 20.0
Launch: TypeAlias = Callable[..., AbstractAsyncContextManager["Stack"]]


@dataclass
class Answer:
    """A finished stream; the index of every token was checked."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    messages: list[pb.GenerateResponse] = field(default_factory=list)

    @property
    def finish(self) -> pb.Finish:
        """Of the last message."""
        return self.messages[-1].finish

    def take(self, message: pb.GenerateResponse) -> None:
        """Adds a message; AssertionError when an index is missing or doubled, or something follows the finish."""
        assert not (self.messages and self.messages[-1].HasField("finish")), "a message after the finish"
        if message.token_ids:
            assert message.first_index == len(self.token_ids)
        self.token_ids += message.token_ids
        self.text += message.text
        self.messages.append(message)


@dataclass
class Client:
    """Of one gateway."""

    channel: grpc.aio.Channel

    def call(self, request: pb.GenerateRequest, timeout: float = 100.0, **options: Any) -> Any:
        """The raw stream."""
        return rpc.InferenceStub(self.channel).Generate(request, timeout=timeout, **options)

    async def generate(self, request: pb.GenerateRequest, timeout: float = 100.0) -> Answer:
        """Reads a stream to its end."""
        answer = Answer()
        async for message in self.call(request, timeout):
            answer.take(message)
        assert answer.messages, "an empty stream"
        assert answer.messages[-1].HasField("finish")
        return answer

    async def tokens(self, prompt: Sequence[int], **options: Any) -> Answer:
        """Generates for token ids; greedy and past the end of text unless told otherwise."""
        return await self.generate(token_request(prompt, **options))


def token_request(
    prompt: Sequence[int], *, max_tokens: int, temperature: float = 0.0, ignore_eos: bool = True, **sampling: Any
) -> pb.GenerateRequest:
    """A request for token ids."""
    return pb.GenerateRequest(
        input=pb.Input(token_ids=pb.TokenIds(ids=prompt)),
        sampling=pb.Sampling(temperature=temperature, **sampling),
        stopping=pb.Stopping(max_tokens=max_tokens, ignore_eos=ignore_eos),
    )


@dataclass
class Stack:
    """A running `twostroke up`."""

    process: asyncio.subprocess.Process
    log: Path
    events: list[dict[str, Any]]
    client: Client
    address: str
    changed: asyncio.Condition
    http: str = ""  # base URL of the HTTP API

    def current(self, name: str) -> dict[str, Any]:
        """The last `started` event of a process: its pid and address."""
        return next(e for e in reversed(self.events) if e["event"] == "started" and e["name"] == name)

    def workers(self) -> list[str]:
        """Names of the workers."""
        names = dict.fromkeys(e["name"] for e in self.events if e["event"] == "started")
        return [name for name in names if name != "gateway"]

    def signal(self, name: str, number: signal.Signals) -> int:
        """Sends a signal to a process; its pid."""
        pid = int(self.current(name)["pid"])
        os.kill(pid, number)
        return pid

    async def event(self, kind: str, name: str, *, after_pid: int | None = None, timeout: float = START_S) -> None:
        """Waits until `name` had this event; with `after_pid`, one that follows that process's exit."""

        def seen() -> bool:
            start = 0
            if after_pid is not None:
                exits = [i for i, e in enumerate(self.events) if e["event"] == "exited" and e.get("pid") == after_pid]
                if not exits:
                    return False
                start = exits[-1]
            return any(e["event"] == kind and e.get("name") == name for e in self.events[start:])

        async with asyncio.timeout(timeout), self.changed:
            await self.changed.wait_for(seen)

    async def joined(self, *, prefill: int, decode: int, timeout: float = START_S) -> None:
        """Waits until the gateway has so many workers."""
        async with asyncio.timeout(timeout):
            while True:
                with contextlib.suppress(grpc.aio.AioRpcError):
                    model = await rpc.InferenceStub(self.client.channel).GetModel(pb.GetModelRequest(), timeout=2)
                    if (model.prefill_workers, model.decode_workers) == (prefill, decode):
                        return
                await asyncio.sleep(0.1)

    async def status(self, name: str) -> worker_pb2.Status:
        """A worker's own figures, over a session like a gateway's."""
        channel = open_channel(self.current(name)["address"])
        identity = worker_pb2.Identity(
            protocol=PROTOCOL, incarnation=secrets.randbits(63) | 1, name="test", pid=os.getpid()
        )
        hello = worker_pb2.ToWorker(hello=worker_pb2.GatewayHello(identity=identity))
        session = worker_pb2_grpc.WorkerStub(channel).Session(timeout=10)
        try:
            await session.write(hello)
            while True:
                message = await session.read()
                assert message is not grpc.aio.EOF, f"{name} ended the session: {await session.code()}"
                if message.WhichOneof("kind") == "status":
                    return message.status
        finally:
            session.cancel()
            await channel.close()

    async def whole(self) -> None:
        """Every worker: all pages free or cached, no ticket open, nothing running; no integrity error in the log."""
        for name in self.workers():
            async with asyncio.timeout(WHOLE_S):
                while True:
                    status = await self.status(name)
                    rest = (status.pages - status.free_pages, status.ticket_pages, status.running, status.waiting)
                    if rest == (0, 0, 0, 0):
                        break
        text = self.log.read_text()
        assert "integrity" not in text.lower(), text
        assert "Traceback" not in text, text


@contextlib.asynccontextmanager
async def launched(log: Path, *flags: str) -> AsyncIterator[Stack]:
    """`twostroke up` with these flags on free ports; stopped, and checked to have ended well, at the end.

    Prompts are computed by prefill workers, unless a flag says otherwise: most tests are about the hand-over.
    """
    if "--disaggregate" not in flags:
        flags = (*flags, "--disaggregate", "always")
    command = [sys.executable, "-m", "twostroke.services.cli", "up", "--json", "--listen", "127.0.0.1:0", *flags]
    with log.open("wb") as errors:
        process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, stderr=errors)
    events: list[dict[str, Any]] = []
    changed = asyncio.Condition()

    async def read() -> None:
        assert process.stdout is not None
        async for line in process.stdout:
            async with changed:
                events.append(json.loads(line))
                changed.notify_all()
        async with changed:
            events.append({"event": "ended"})
            changed.notify_all()

    reader = asyncio.create_task(read())
    try:
        async with asyncio.timeout(START_S), changed:
            await changed.wait_for(lambda: any(e["event"] in ("serving", "ended") for e in events))
        serving = next((e for e in events if e["event"] == "serving"), None)
        assert serving is not None, log.read_text()
        channel = open_channel(serving["address"])
        yield Stack(process, log, events, Client(channel), serving["address"], changed, serving["http"])
        await channel.close()
        process.terminate()
        async with asyncio.timeout(60):
            assert await process.wait() == 0, log.read_text()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)
