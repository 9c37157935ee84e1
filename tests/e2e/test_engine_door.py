"""The door for LLM routers against real processes: the same tokens as natively, Abort, what the caches hold."""

import asyncio
import contextlib
import signal
from pathlib import Path
from typing import Any

import pytest

from twostroke.smg import common_pb2
from twostroke.smg import vllm_engine_pb2 as pb
from twostroke.smg.vllm_engine_pb2_grpc import VllmEngineStub

from ..services.engine_fuzz import fuzz
from .harness import Launch, Stack, token_request

FLAGS = ("--threads", "1", "--dtype", "float32", "--kv-memory", "16MiB")
PAGE = 16


def request(ids: list[int], name: str = "", **params: Any) -> pb.GenerateRequest:
    """A greedy stream that the end of text does not end."""
    return pb.GenerateRequest(
        request_id=name,
        tokenized=pb.TokenizedInput(input_ids=ids),
        sampling_params=pb.SamplingParams(temperature=0, ignore_eos=True, **params),
        stream=True,
    )


async def tokens(stub: VllmEngineStub, wanted: pb.GenerateRequest) -> tuple[list[int], pb.GenerateComplete]:
    """Of all chunks, and the end."""
    told: list[int] = []
    end = pb.GenerateComplete()
    async for message in stub.Generate(wanted, timeout=100):
        told += message.chunk.token_ids
        if message.HasField("complete"):
            end = message.complete
    return told, end


class Index:
    """What a subscriber knows of the caches: by block, what it continues and its tokens."""

    def __init__(self, stub: VllmEngineStub) -> None:
        self.call = stub.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest(), timeout=100)
        self.blocks: dict[int, tuple[int | None, list[int]]] = {}
        self.sequence = 0

    async def read(self) -> None:
        """One batch; the numbers have no gap."""
        batch = await self.call.read()
        assert isinstance(batch, common_pb2.KvEventBatch)
        self.sequence += 1
        assert batch.sequence_number == self.sequence
        for event in batch.events:
            if event.HasField("cleared"):
                self.blocks.clear()
            for block_hash in event.removed.block_hashes:
                del self.blocks[block_hash]
            parent = event.stored.parent_block_hash if event.stored.HasField("parent_block_hash") else None
            for block in event.stored.blocks:
                assert block.block_size == len(block.token_ids) == PAGE
                assert block.block_hash not in self.blocks
                self.blocks[block.block_hash] = (parent, list(block.token_ids))
                parent = block.block_hash

    def prefix(self, ids: list[int]) -> int:
        """How many leading tokens are cached."""
        parent: int | None = None
        for start in range(0, len(ids), PAGE):
            page = ids[start : start + PAGE]
            found = [number for number, block in self.blocks.items() if block == (parent, page)]
            if len(found) != 1:
                return start
            parent = found[0]
        return len(ids) - len(ids) % PAGE

    async def until(self, ids: list[int], cached: int) -> None:
        async with asyncio.timeout(30):
            while self.prefix(ids) < cached:
                await self.read()


async def aborts(stack: Stack, stub: VllmEngineStub) -> None:
    """At several moments, while somebody else's answer goes on."""
    neighbour = asyncio.create_task(tokens(stub, request(list(range(20, 40)), max_tokens=200)))
    for index, (length, wait_s) in enumerate(((20, 0.0), (900, 0.0), (900, 0.05), (20, 0.3), (20, 0.5))):
        name = f"gone-{index}"
        call = asyncio.create_task(tokens(stub, request([30 + index] * length, name, max_tokens=900)))
        await asyncio.sleep(wait_s)
        while not call.done():  # it may not have arrived yet
            await stub.Abort(pb.AbortRequest(request_ids=[name]))
            await asyncio.wait([call], timeout=0.05)
        assert (await call)[1].finish_reason == "abort"
        assert len((await call)[0]) < 900
    told, end = await neighbour
    assert (len(told), end.finish_reason) == (200, "length")
    await stack.whole()


async def scores(stack: Stack, stub: VllmEngineStub, prompt: list[int]) -> None:
    """Log-probabilities of prompt and answer are those of the native API."""
    wanted = token_request(prompt, max_tokens=3)
    wanted.logprobs = wanted.prompt_logprobs = 2
    native = await stack.client.generate(wanted)
    asked = request(prompt, max_tokens=3, logprobs=2, prompt_logprobs=2)
    messages = [message async for message in stub.Generate(asked)]
    first = messages[0].chunk
    asked.stream = False
    [whole] = [message.complete async for message in stub.Generate(asked)]
    assert first.input_logprobs == whole.input_logprobs
    told = whole.input_logprobs
    assert list(told.token_ids) == prompt
    assert not told.token_logprobs[0].HasField("value")
    own = [entry for message in native.messages for entry in message.prompt_logprobs]
    assert [each.value for each in told.token_logprobs[1:]] == [entry.logprob for entry in own]
    assert [list(each.token_ids) for each in told.top_logprobs[1:]] == [[t.token_id for t in e.top] for e in own]
    entries = [entry for message in native.messages for entry in message.logprobs]
    assert list(whole.output_logprobs.token_logprobs) == [entry.logprob for entry in entries]


async def test_a_router_s_calls(launch: Launch, tiny_dir: Path) -> None:
    async with launch("--model", str(tiny_dir), *FLAGS) as stack:
        stub = VllmEngineStub(stack.client.channel)
        index = Index(stub)
        await index.read()
        prompt = [7 + i % 50 for i in range(100)]
        told, end = await tokens(stub, request(prompt, max_tokens=60))
        assert told == (await stack.client.tokens(prompt, max_tokens=60)).token_ids
        assert (end.finish_reason, end.prompt_tokens) == ("length", 100)
        await index.until(prompt + told, 144)  # the last token has no KV, and the page before it is not full
        again = await tokens(stub, request([*prompt, 3], max_tokens=2))
        assert again[1].cached_tokens == 96
        await scores(stack, stub, prompt)
        await aborts(stack, stub)
        loads = await stub.GetLoads(pb.GetLoadsRequest())
        async with asyncio.timeout(10):
            while loads.loads[0].num_total_reqs or loads.loads[0].token_usage:
                await asyncio.sleep(0.1)
                loads = await stub.GetLoads(pb.GetLoadsRequest())
        assert loads.loads[0].cache_hit_rate > 0
        assert loads.loads[0].max_running_requests == 64
        index.call.cancel()


@pytest.mark.slow
async def test_the_caches_are_followed_through_evictions_and_deaths(launch: Launch, tiny_dir: Path) -> None:
    """In pools that hold a few prompts; then the workers die, and what they had is gone."""
    flags = ("--threads", "1", "--dtype", "float32", "--kv-memory", "1MiB", "--model", str(tiny_dir))
    async with launch(*flags) as stack:
        stub = VllmEngineStub(stack.client.channel)
        index = Index(stub)
        await index.read()
        prompts = [[3 + (number * 31 + i * (number + 1)) % 97 for i in range(320)] for number in range(12)]
        for prompt in prompts:
            await tokens(stub, request(prompt, max_tokens=4))
        await index.until(prompts[-1], 320)
        with contextlib.suppress(TimeoutError):  # until nothing is told any more
            while True:
                async with asyncio.timeout(3):
                    await index.read()
        index.call.cancel()
        fresh = Index(stub)
        async with asyncio.timeout(10):
            while fresh.blocks != index.blocks:
                await fresh.read()
        cached = [number for number, prompt in enumerate(prompts) if fresh.prefix(prompt) == 320]
        assert 11 in cached
        assert 0 not in cached  # it was evicted
        _, end = await tokens(stub, request([*prompts[11], 5], max_tokens=2))
        assert end.cached_tokens == 320
        pids = [stack.signal(name, signal.SIGKILL) for name in stack.workers()]
        async with asyncio.timeout(60):
            while fresh.blocks:
                await fresh.read()
        for name, pid in zip(stack.workers(), pids, strict=True):
            await stack.event("ready", name, after_pid=pid)
        await stack.joined(prefill=1, decode=1)
        await tokens(stub, request(prompts[3], max_tokens=4))
        await fresh.until(prompts[3], 320)
        fresh.call.cancel()


@pytest.mark.slow
async def test_any_request(launch: Launch, tiny_dir: Path) -> None:
    """Generated messages and aborts; every page comes back."""
    flags = ("--threads", "1", "--dtype", "float32", "--kv-memory", "4MiB", "--model", str(tiny_dir))
    async with launch(*flags) as stack:
        seen = await asyncio.to_thread(fuzz, stack.address, 150, 60.0, scored=True)
        assert seen["OK"] > 50, seen
        await stack.whole()
