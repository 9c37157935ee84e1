"""A stand-in for a worker: the real worker API over real gRPC, without an engine; its tokens follow a script.

In a test's own loop (`StandIn(...).start()`), or as a process that can be killed:
python stand_in_worker.py ROLE NAME PAUSE_S ADDRESS: it prints its address.
"""

import asyncio
import sys
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import grpc.aio

from twostroke.engine.request import FinishReason, PromptLogprobs, SequenceKey, SequenceOutput, SequenceTimings, Token
from twostroke.errors import Mismatch, Unavailable
from twostroke.services.grpc_setup import bind, create_server
from twostroke.services.identity import draw_identity, read_identity
from twostroke.services.interceptor import ErrorInterceptor
from twostroke.services.worker.wire import pack_step
from twostroke.v1 import worker_pb2 as pb
from twostroke.v1 import worker_pb2_grpc

ROLES = {"prefill": pb.ROLE_PREFILL, "decode": pb.ROLE_DECODE, "both": pb.ROLE_BOTH}
EOS = 2
FOREVER = 1_000_000
SAMPLE_STEP = 40  # what is added to the tokens of each further sample


@dataclass
class Script:
    """What a worker answers. The output is `tokens`, then an end-of-text token; or it is cut by `max_tokens`."""

    tokens: list[int] = field(default_factory=lambda: list(range(10, 40)))
    mute_after: int = FOREVER  # says nothing after so many tokens
    fail: tuple[pb.FailureCode.ValueType, str] | None = None  # instead of going on after `mute_after` tokens
    fail_field: str = ""  # that the failure names
    pause_s: float = 0.0  # before each token
    per_step: int = 1  # tokens a message
    first_tokens: bool = True  # PREFILL: sends token 0
    twice: bool = False  # sends every message twice
    scores: bool = False  # tells the prompt's log-probabilities to whoever asks for them
    fail_attempts: int = FOREVER  # `mute_after` and `fail` hold for attempts below


class StandIn(worker_pb2_grpc.WorkerServicer):
    """One worker. `submits`, `cancels` and `peers` are what gateways sent; `live` what runs."""

    def __init__(
        self, role: str, name: str, script: Script | None = None, *, pages: int = 1000, **format_: Any
    ) -> None:
        self.role, self.name, self.script, self.pages = role, name, script or Script(), pages
        self.identity = draw_identity(name, "test-host")
        self.format = pb.ModelFormat(model="llama", kv_dtype="float32", page_size=16, layers=2, kv_heads=2, head_dim=16)
        for key, value in format_.items():
            setattr(self.format, key, value)
        self.max_tokens = 2048
        self.max_batch = 64
        self.ready = True
        self.frozen = False  # says nothing at all any more
        self.draining = False
        self.waiting_tokens = 0  # that it tells of
        self.address = ""
        self.submits: list[pb.Submit] = []
        self.cancels: Counter[int] = Counter()
        self.peers: list[pb.Peer] = []
        self.orders: list[pb.ToWorker] = []
        self.sessions = 0
        self.heartbeats = 0
        self.live: dict[tuple[int, int, int], asyncio.Task[None]] = {}
        self.changed = asyncio.Event()
        self._outboxes: set[asyncio.Queue[pb.FromWorker | None]] = set()
        self._server: grpc.aio.Server | None = None

    async def start(self, address: str = "127.0.0.1:0") -> str:
        """Serves; returns host:port."""
        self._server = create_server((ErrorInterceptor(),))
        worker_pb2_grpc.add_WorkerServicer_to_server(self, self._server)
        self.address = bind(self._server, address)
        await self._server.start()
        return self.address

    async def stop(self) -> None:
        """Goes away at once, as if killed."""
        for task in self.live.values():
            task.cancel()
        if self._server is not None:
            server, self._server = self._server, None
            await server.stop(None)

    @property
    def serves(self) -> bool:
        """Whether it can be connected to."""
        return self._server is not None

    def hello(self) -> pb.WorkerHello:
        return pb.WorkerHello(
            identity=self.identity.message(),
            role=ROLES[self.role],
            format=self.format,
            address=self.address,
            pages=self.pages,
            max_batch=self.max_batch,
            max_tokens=self.max_tokens,
        )

    def status(self, **values: Any) -> None:
        """Tells all gateways a load."""
        self.say(pb.FromWorker(status=pb.Status(**{"free_pages": self.pages, "pages": self.pages, **values})))

    def say(self, message: pb.FromWorker) -> None:
        for outbox in self._outboxes:
            outbox.put_nowait(message)

    async def Session(  # type: ignore[override]  # noqa: N802
        self, request_iterator: AsyncIterator[pb.ToWorker], context: Any
    ) -> None:
        first = await anext(request_iterator)
        gateway = read_identity(first.hello.identity).incarnation
        if not self.ready:
            raise Unavailable("the worker is not ready")
        if first.hello.model not in ("", self.format.model):
            raise Mismatch(f"model {self.format.model!r} here, {first.hello.model!r} there")
        self.sessions += 1
        outbox: asyncio.Queue[pb.FromWorker | None] = asyncio.Queue()
        outbox.put_nowait(pb.FromWorker(hello=self.hello()))
        self._outboxes.add(outbox)
        writer = asyncio.create_task(self._write(outbox, context))
        beats = asyncio.create_task(self._beats(outbox))
        mine: set[tuple[int, int, int]] = set()
        try:
            async for message in request_iterator:
                self._receive(message, gateway, outbox, mine)
                self.changed.set()
        finally:
            self._outboxes.discard(outbox)
            for task in (writer, beats, *(self.live[key] for key in mine if key in self.live)):
                task.cancel()
            self.changed.set()

    async def Link(self, request_iterator: Any, context: Any) -> None:  # type: ignore[override]  # noqa: N802
        raise Mismatch("no links")

    async def _write(self, outbox: asyncio.Queue[pb.FromWorker | None], context: Any) -> None:
        while (message := await outbox.get()) is not None:
            if not self.frozen:
                await context.write(message)

    async def _beats(self, outbox: asyncio.Queue[pb.FromWorker | None]) -> None:
        beat = 0
        while True:
            await asyncio.sleep(0.3)
            beat += 1
            status = pb.Status(
                sequence=beat,
                free_pages=self.pages,
                pages=self.pages,
                draining=self.draining,
                waiting_tokens=self.waiting_tokens,
            )
            outbox.put_nowait(pb.FromWorker(status=status))

    def _receive(self, message: pb.ToWorker, gateway: int, outbox: asyncio.Queue[Any], mine: set[Any]) -> None:
        match message.WhichOneof("kind"):
            case "submit":
                submit = message.submit
                self.submits.append(submit)
                for sample in range(submit.sample, submit.sample + max(1, submit.samples)):
                    self._begin((submit.request, sample, submit.attempt), gateway, submit, outbox, mine)
            case "cancel":
                cancel = message.cancel
                samples = cancel.samples or [None] * len(cancel.requests)
                for request, attempt, sample in zip(cancel.requests, cancel.attempts, samples, strict=True):
                    self.cancels[request] += 1
                    for key, task in list(self.live.items()):
                        if key[0] == request and key[2] <= attempt and sample in (None, key[1]):
                            task.cancel()
            case "peers":
                self.peers = list(message.peers.peers)
            case "heartbeat":
                self.heartbeats += 1
            case "drain":
                self.orders.append(message)
                self.draining = message.drain.drain
                self.status(draining=self.draining)
            case "set_role" | "watch_cache":
                self.orders.append(message)

    def _begin(
        self, key: tuple[int, int, int], gateway: int, submit: pb.Submit, outbox: asyncio.Queue[Any], mine: set[Any]
    ) -> None:
        mine.add(key)
        self.live[key] = asyncio.create_task(self._play(gateway, submit, key[1], outbox))
        self.live[key].add_done_callback(lambda _: (self.live.pop(key, None), self.changed.set()))

    async def _play(self, gateway: int, submit: pb.Submit, sample: int, outbox: asyncio.Queue[Any]) -> None:
        script = self.script
        output = [*(token + SAMPLE_STEP * sample for token in script.tokens), EOS]
        finish = FinishReason.STOP
        if len(output) > submit.params.max_tokens:
            output, finish = output[: submit.params.max_tokens], FinishReason.LENGTH
        first = submit.first_index
        ends = len(output) == first + 1
        faulty = submit.attempt < script.fail_attempts
        if submit.work == pb.WORK_PREFILL:
            output = output[: first + 1] if script.first_tokens else output[:first]
        key = SequenceKey(gateway, submit.request, sample, submit.attempt)
        if (
            script.scores
            and sample == 0
            and submit.work != pb.WORK_DECODE
            and submit.params.HasField("prompt_logprobs")
        ):
            scores = SequenceOutput(key, first, [], None, None, self._scores(submit))
            outbox.put_nowait(pack_step(first + 1, [scores]))
        for at in range(first, len(output), script.per_step):
            if script.pause_s:
                await asyncio.sleep(script.pause_s)
            tokens = output[at : at + script.per_step]
            if faulty and at + len(tokens) > script.mute_after:
                break
            last = at + len(tokens) == len(output) and (submit.work != pb.WORK_PREFILL or ends)
            made = SequenceOutput(
                key,
                at,
                [Token(token, self._logprobs(token, submit)) for token in tokens],
                finish if last else None,
                SequenceTimings(0.001, 0.002, 0.003, 5) if at == first or last else None,
            )
            for _ in range(2 if script.twice else 1):
                outbox.put_nowait(pack_step(at + 1, [made]))
        else:
            return
        if faulty and script.fail is not None:
            code, text = script.fail
            failure = pb.Failure(request=key.request, sample=key.sample, attempt=key.attempt, code=code, message=text)
            failure.field = script.fail_field
            outbox.put_nowait(pb.FromWorker(failure=failure))
            return
        await asyncio.Event().wait()  # until cancelled

    @staticmethod
    def _scores(submit: pb.Submit) -> PromptLogprobs:
        """Of each token of the prompt but the first."""
        most = submit.params.prompt_logprobs
        ids = [each for token in submit.prompt_ids[1:] for each in (token, *range(most))]
        return PromptLogprobs(1, [1 + most] * (len(submit.prompt_ids) - 1), ids, [-1.0] * len(ids))

    @staticmethod
    def _logprobs(token: int, submit: pb.Submit) -> tuple[tuple[int, float], ...]:
        if not submit.params.HasField("logprobs"):
            return ()
        return ((token, -0.5), *((other, -1.0 - other) for other in range(submit.params.logprobs)))


async def main(role: str, name: str, pause_s: str, address: str) -> None:
    """Until killed."""
    worker = StandIn(role, name, Script(tokens=[10 + i % 200 for i in range(1500)], pause_s=float(pause_s)))
    print(await worker.start(address), flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
