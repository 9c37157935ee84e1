"""Prefill and decode workers in one process: real engines' control, drivers, links on loopback and mapped pools, under
a runner without a model that really uses the pages' memory.

What a sequence answers depends on every byte of KV that it should have: `expected_tokens` says what is right.
"""

import asyncio
import os
import random
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from hashlib import blake2b
from pathlib import Path
from typing import Any

import grpc.aio
import torch
from torch import Tensor

from twostroke.engine.batch import Computed, Launched, LayerHook, Row
from twostroke.engine.config import EngineOptions
from twostroke.engine.core import EngineCore
from twostroke.engine.request import (
    FinishReason,
    Request,
    SamplingParams,
    SequenceKey,
    SequenceTimings,
    StepResult,
    Token,
    Work,
)
from twostroke.kvtransfer.nixl_export import NixlExport
from twostroke.kvtransfer.pool_pages import pool_bytes
from twostroke.kvtransfer.process import host_id
from twostroke.kvtransfer.shm import SharedPool
from twostroke.services.grpc_setup import bind, create_server
from twostroke.services.handover.decode import DecodeHandover
from twostroke.services.handover.handover import PeerAddress
from twostroke.services.handover.kv_pool import NixlOpener, shm_opener
from twostroke.services.handover.link_client import LinkClient
from twostroke.services.handover.link_server import LinkServer
from twostroke.services.handover.liveness import Liveness
from twostroke.services.handover.pool_exports import PoolExports
from twostroke.services.handover.pool_opener import Open, PoolOpener
from twostroke.services.handover.prefill import PrefillHandover
from twostroke.services.handover.wire_link import PoolOffer
from twostroke.services.identity import ProcessIdentity
from twostroke.services.interceptor import ErrorInterceptor
from twostroke.services.worker.driver import Driver
from twostroke.v1 import worker_pb2 as pb
from twostroke.v1 import worker_pb2_grpc

LAYERS, PAGE, VOCAB = 3, 4, 997
GATEWAY = 77
WAYS = ("shm",)


def next_token(context: Sequence[int], sample: int = 0) -> int:
    """The "model": a hash of all tokens so far; each sample has its own noise."""
    content = b"".join(token.to_bytes(4, "little") for token in context) + bytes([sample] if sample else [])
    return int.from_bytes(blake2b(content, digest_size=8).digest(), "little") % VOCAB


def expected_tokens(
    prompt: Sequence[int], count: int, stop: frozenset[int] = frozenset(), sample: int = 0
) -> list[int]:
    """What a sequence must answer."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens, sample))
        if tokens[-1] in stop:
            break
    return tokens[len(prompt) :]


class TensorRunner:
    """Keeps tokens in place of KV: in each layer's K, with the position in V; reads all layers of all positions."""

    overlaps = False

    def __init__(self, pool: Tensor) -> None:
        """`pool`: [LAYERS, pages, 2, 1, PAGE, 2] int32."""
        self.pool = pool
        self.after_layer: Callable[[int, list[Row]], None] = lambda layer, rows: None
        self.tokens_run = 0
        self.fail_with: Exception | None = None

    def launch(self, rows: list[Row], hook: LayerHook | None) -> Launched:
        return Computed(self.run(rows, hook))

    def run(self, rows: list[Row], hook: LayerHook | None) -> list[Token]:
        progress = [row.progress for row in rows if row.progress is not None]
        for layer in range(LAYERS):
            for row in rows:
                self._write(layer, row)
            self.after_layer(layer, rows)
            if hook is not None:
                hook(layer, progress)
        if self.fail_with is not None:
            error, self.fail_with = self.fail_with, None
            raise error
        self.tokens_run += sum(len(row.token_ids) for row in rows)
        samples = [(row, row.key.sample + index) for row in rows if row.sample for index in range(row.samples)]
        return [self._sample(row, sample) for row, sample in samples]

    def copy_pages(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        self.pool[:, torch.tensor(targets)] = self.pool[:, torch.tensor(sources)]

    def _sample(self, row: Row, sample: int) -> Token:
        token = next_token(self.read(row.pages, row.start + len(row.token_ids)), sample)
        return Token(token, () if row.params.logprobs is None else ((token, -0.5), (1, -2.0)))

    def _write(self, layer: int, row: Row) -> None:
        positions = torch.arange(row.start, row.start + len(row.token_ids))
        pages = torch.tensor(row.pages)[positions // PAGE]
        tokens = torch.tensor(row.token_ids, dtype=torch.int32) + VOCAB * layer
        self.pool[layer, pages, 0, 0, positions % PAGE, 0] = tokens
        self.pool[layer, pages, 1, 0, positions % PAGE, 1] = positions.to(torch.int32)

    def read(self, pages: Sequence[int], length: int) -> list[int]:
        """The tokens that lie there; raises where any layer has something else than what was written."""
        slots = self.pool[:, torch.tensor(pages)]  # [layers, n, 2, 1, PAGE, 2]
        tokens = slots[:, :, 0, 0, :, 0].flatten(1)[:, :length] - VOCAB * torch.arange(LAYERS)[:, None]
        positions = slots[:, :, 1, 0, :, 1].flatten(1)[:, :length]
        if not (tokens == tokens[0]).all() or not (positions == torch.arange(length)).all():
            raise AssertionError("the KV in the pages is not this sequence's")
        return [int(token) for token in tokens[0]]


def form(**changes: Any) -> pb.ModelFormat:
    """The format of all workers here, but for `changes`."""
    fields: dict[str, Any] = {
        "model": "fake",
        "fingerprint": "f" * 64,
        "kv_dtype": "int32",
        "page_size": PAGE,
        "layers": LAYERS,
        "kv_heads": 1,
        "head_dim": 2,
        "ranks": 1,
        "num_kv_heads": 1,
    }
    return pb.ModelFormat(**{**fields, **changes})


class Worker:
    """What both roles have: an engine over a mapped pool, and what came out of it."""

    def __init__(self, name: str, directory: Path, pages: int, silence_s: float, options: dict[str, Any]) -> None:
        self.late: Any = options.pop("late", None)  # a `late_device.LateHandover`
        self.identity = ProcessIdentity(secrets.randbits(64) or 1, name, os.getpid(), host_id())
        shape = (LAYERS, pages, 2, 1, PAGE, 2)
        self.shared = SharedPool.create(directory, torch.Size(shape).numel() * 4, incarnation=self.identity.incarnation)
        self.pool = self.shared.tensor.view(torch.int32).view(shape)
        self.pages = pages
        self.runner: TensorRunner = TensorRunner(self.pool) if self.late is None else self.late.make_runner(self.pool)
        self.options = EngineOptions(page_size=PAGE, **{"reserve": "prompt", "watermark": 0.0, **options})
        self.core = EngineCore(
            self.runner,
            self.options,
            pages=pages,
            context_length=512,
            vocab_size=VOCAB,
            eos_token_ids=frozenset(),
            cache_root=b"fake",
        )
        self.liveness = Liveness(host_id(), silence_s=silence_s)
        self.driver: Driver
        self.tokens: dict[SequenceKey, list[int]] = {}
        self.logprobs: dict[SequenceKey, list[tuple[tuple[int, float], ...]]] = {}
        self.timings: dict[SequenceKey, list[SequenceTimings]] = {}
        self.first_index: dict[SequenceKey, int] = {}
        self.finishes: dict[SequenceKey, FinishReason] = {}
        self.failures: dict[SequenceKey, Exception] = {}
        self.news = asyncio.Event()

    @property
    def page_bytes(self) -> int:
        """Of one page of one layer."""
        return pool_bytes(self.pool).shape[2]

    def on_result(self, result: StepResult) -> None:
        """Collects; every index must come once and in order."""
        for output in result.outputs:
            if output.key not in self.tokens:
                self.tokens[output.key] = []
                self.first_index[output.key] = output.first_index
            got = self.tokens[output.key]
            assert output.first_index == self.first_index[output.key] + len(got), "an index came twice or is missing"
            assert output.key not in self.finishes, "a token after the end"
            got.extend(token.token_id for token in output.tokens)
            self.logprobs.setdefault(output.key, []).extend(token.logprobs for token in output.tokens)
            if output.timings is not None:
                self.timings.setdefault(output.key, []).append(output.timings)
            if output.finish is not None:
                self.finishes[output.key] = output.finish
        for key, error in result.failures:
            assert key not in self.failures, "two failures"
            self.failures[key] = error
        self.news.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Waits for something that a result brings."""
        while not condition():
            self.news.clear()
            await self.news.wait()

    async def ended(self, key: SequenceKey) -> None:
        """Waits for its finish or failure."""
        await self.until(lambda: key in self.finishes or key in self.failures)

    def submit(self, request: Request, peer: "Worker | PeerAddress | None") -> None:
        """To the engine."""
        self.driver.submit(request, peer.peer if isinstance(peer, Worker) else peer)

    @property
    def peer(self) -> PeerAddress:
        """As a gateway would name it."""
        return PeerAddress(getattr(self, "address", "127.0.0.1:1"), self.identity.incarnation)

    async def settled(self, condition: Callable[[], bool]) -> None:
        """Waits for a state of the engine's thread that no result announces."""
        while not await self.driver.call(condition):
            await asyncio.sleep(0.005)

    async def whole(self, machine: Any) -> None:
        """Waits until nothing is left, then checks that every page is accounted for."""
        load = self.core.load
        await self.settled(
            lambda: (
                not machine.open_tickets()
                and load().running == load().waiting == load().held_pages == 0
                and load().free_pages == load().pages
            )
        )
        await self.driver.call(lambda: (self.core.check_integrity(idle=True), machine.check(idle=True)))
        await self.driver.call(lambda: self.driver.handover.check(idle=True))


class PrefillWorker(Worker):
    """Role `prefill`, with its server."""

    def __init__(self, name: str, directory: Path, pages: int, silence_s: float, **options: Any) -> None:
        ways = options.pop("ways", WAYS)
        super().__init__(name, directory, pages, silence_s, options)
        self.nixl = NixlOpener(self.pool, self.identity.incarnation)
        both: dict[str, Open] = {"shm": shm_opener(self.pool), "nixl": self.nixl}
        if self.late is not None:
            both["shm"] = self.late.opener(both["shm"])
        self.opener = PoolOpener({way: both[way] for way in ways})
        self.links = LinkServer(
            self.identity, form(), self.liveness, self.opener, page_bytes=self.page_bytes, heartbeat_s=0.2
        )
        written = (lambda layer: None) if self.late is None else self.late.runner.written
        ends = None if self.late is None else self.late.ends
        self.handover = PrefillHandover(self.core, self.links, self.pool, written=written, ends=ends)
        self.driver = Driver(self.core, self.handover, asyncio.get_running_loop(), self.on_result)
        self.server: grpc.aio.Server | None = None
        self.address = "127.0.0.1:0"

    async def start(self) -> None:
        """Starts engine and server."""
        self.driver.start()
        await self.start_server()

    async def start_server(self, links: LinkServer | None = None) -> None:
        """Starts a server, at the address of the last one."""
        self.server = create_server([ErrorInterceptor()])
        worker_pb2_grpc.add_WorkerServicer_to_server(_Servicer(links or self.links), self.server)
        self.address = bind(self.server, self.address)
        await self.server.start()

    async def stop(self) -> None:
        """In the order that `LinkServer` asks for."""
        await self.driver.stop()
        self.links.stop()
        if self.server is not None:
            await self.server.stop(0.5)
        self.handover.close()
        self.nixl.close()
        self.liveness.close()
        self.shared.close()

    async def all_whole(self) -> None:
        """See `whole`."""
        await self.whole(self.handover.writer)

    async def told(self) -> None:
        """Waits until an event of a link waits for the engine's thread, which a test holds up."""
        while not self.handover._inbox:
            await asyncio.sleep(0.005)


class DecodeWorker(Worker):
    """Role `decode`."""

    def __init__(
        self, name: str, directory: Path, pages: int, silence_s: float, ticket_valid_s: float = 60.0, **options: Any
    ) -> None:
        (way, *further) = options.pop("ways", WAYS)
        super().__init__(name, directory, pages, silence_s, options)
        descriptors = {"shm": self.shared.descriptor, "nixl": b""}
        rest = tuple((name, descriptors[name]) for name in further)
        offer = PoolOffer(self.identity.incarnation, pages, self.page_bytes, descriptors[way], way, rest)
        self.exports = PoolExports("nixl", lambda: NixlExport(self.shared.tensor, self.identity.incarnation))
        self.links = LinkClient(self.identity, form(), self.liveness, offer, exports=self.exports, heartbeat_s=0.2)
        digester = None if self.late is None else self.late.digester(pool_bytes(self.pool))
        self.handover = DecodeHandover(
            self.core, self.links, self.pool, pool_id=offer.pool, ticket_valid_s=ticket_valid_s, digester=digester
        )
        self.driver = Driver(self.core, self.handover, asyncio.get_running_loop(), self.on_result)

    async def start(self) -> None:
        """Starts the engine."""
        self.driver.start()

    async def stop(self) -> None:
        """In the order that `LinkClient` asks for."""
        await self.driver.stop()
        await self.links.stop()
        self.handover.close()
        self.exports.close()
        self.liveness.close()
        self.shared.close()

    async def all_whole(self) -> None:
        """See `whole`."""
        await self.whole(self.handover.reader)


class _Servicer(worker_pb2_grpc.WorkerServicer):
    def __init__(self, links: LinkServer) -> None:
        self._links = links

    async def Session(self, request_iterator: Any, context: Any) -> None:  # type: ignore[override]  # noqa: N802
        raise NotImplementedError

    async def Link(self, request_iterator: Any, context: Any) -> None:  # type: ignore[override]  # noqa: N802
        await self._links.serve(request_iterator, context)


class Rig:
    """A gateway in miniature over one prefill and one decode worker."""

    def __init__(self, directory: Path, *, pages: int = 65, silence_s: float = 10.0, **options: Any) -> None:
        decode_options = {key: options.pop(key) for key in ("ticket_valid_s",) if key in options}
        late_p, late_d = options.pop("late", (None, None))
        self.p = PrefillWorker("p", directory, options.pop("prefill_pages", pages), silence_s, late=late_p, **options)
        self.d = DecodeWorker("d", directory, pages, silence_s, late=late_d, **decode_options, **options)
        self._number = 0

    def requests(
        self,
        prompt: list[int],
        count: int,
        *,
        start_now: bool = True,
        output_ids: Sequence[int] = (),
        samples: int = 1,
        **params: Any,
    ) -> tuple[Request, Request]:
        """The two halves of a new request."""
        self._number += 1
        key = SequenceKey(GATEWAY, self._number, 0, 0)
        sampling = SamplingParams(temperature=0.0, max_tokens=count, **params)
        writer = self.p.identity.incarnation
        common: dict[str, Any] = {"key": key, "params": sampling, "arrival": time.monotonic(), "samples": samples}
        prompts: dict[str, Any] = {"prompt_ids": list(prompt), "output_ids": list(output_ids)}
        prefill = Request(work=Work.PREFILL, start_now=start_now, **common, **prompts)
        return prefill, Request(work=Work.DECODE, writer=writer, **common, **prompts)

    def start(self, prompt: list[int], count: int, **params: Any) -> SequenceKey:
        """Sends both halves at once."""
        prefill, decode = self.requests(prompt, count, **params)
        self.p.submit(prefill, self.d)
        self.d.submit(decode, self.p)
        return prefill.key

    async def result(self, key: SequenceKey) -> list[int]:
        """The decode worker's tokens, which must begin with the prefill worker's."""
        await self.d.ended(key)
        if key in self.d.failures:
            raise self.d.failures[key]
        if key in self.p.tokens:
            assert self.p.tokens[key] == self.d.tokens[key][:1]
        return self.d.tokens[key]

    async def generate(self, prompt: list[int], count: int, **params: Any) -> list[int]:
        """One request from end to end."""
        return await self.result(self.start(prompt, count, **params))

    async def whole(self) -> None:
        """Both workers: nothing is left, every page is accounted for."""
        await self.p.all_whole()
        await self.d.all_whole()

    async def link_stands(self) -> None:
        """Waits for the link."""
        while not self.d.links.standing():
            await asyncio.sleep(0.005)


@asynccontextmanager
async def running(directory: Path, **options: Any) -> AsyncIterator[Rig]:
    """A rig from start to a stop that leaves no task behind."""
    rig = Rig(directory, **options)
    await rig.p.start()
    await rig.d.start()
    try:
        yield rig
        for worker in (rig.p, rig.d):
            if worker.driver.failure is not None:
                raise worker.driver.failure
    finally:
        await rig.d.stop()
        await rig.p.stop()


def random_prompt(seed: int, length: int) -> list[int]:
    """Tokens drawn from `seed`."""
    return random.Random(seed).choices(range(VOCAB), k=length)
