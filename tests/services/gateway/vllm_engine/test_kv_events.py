"""SubscribeKvEvents: a snapshot, then changes; numbers, tenants, subscribers that do not read."""

import asyncio
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from twostroke.engine.prefix_cache import cache_root, root_digest
from twostroke.services.gateway.cached_blocks import Block, CachedBlocks, Change
from twostroke.services.gateway.vllm_engine.kv_events import BATCH, Stream, block_hash, stored_runs
from twostroke.services.grpc_setup import open_channel
from twostroke.smg import common_pb2 as pb
from twostroke.smg import vllm_engine_pb2_grpc
from twostroke.v1 import worker_pb2

from ...cluster import refusal, until
from ...stand_in_worker import StandIn
from ..test_cached_blocks import block, digest, events
from .engine_client import Engine, engine

ROOT = root_digest(cache_root("", "float32", 16), b"")[:8]
SALTED = root_digest(cache_root("", "float32", 16), b"other")[:8]


def page(number: int, parent: int | None = None, root: bytes = ROOT) -> Block:
    """Of 16 tokens."""
    tokens = b"".join((number * 100 + i).to_bytes(4, "little") for i in range(16))
    return Block(digest(number), root, root if parent is None else digest(parent), tokens)


def tell(worker: StandIn, told: worker_pb2.CacheEvents) -> None:
    worker.say(worker_pb2.FromWorker(cache=told))


def watches(worker: StandIn) -> list[bool]:
    return [order.watch_cache.contents for order in worker.orders if order.HasField("watch_cache")]


async def subscribed(it: Engine, *workers: StandIn, **options: Any) -> Any:
    """The call, after its first, empty snapshot, with all workers told to tell."""
    call = it.stub.SubscribeKvEvents(pb.SubscribeKvEventsRequest(**options))
    first = await call.read()
    assert (first.sequence_number, first.dp_rank) == (1, 0)
    assert (first.snapshot.index, first.snapshot.count, first.snapshot.blocks) == (0, 1, 0)
    assert [event.WhichOneof("data") for event in first.events] == ["cleared"]
    await until(lambda: all(watches(worker)[-1:] == [True] for worker in workers))
    return call


async def test_what_workers_have_is_told_once_with_its_tokens(tiny_llama_dir: Path) -> None:
    prefill, decode = StandIn("prefill", "p0"), StandIn("decode", "d0")
    async with engine(tiny_llama_dir, prefill, decode) as it:
        call = await subscribed(it, prefill, decode, start_sequence_number=77)
        tell(prefill, events(page(1), page(2, 1), page(9, root=SALTED), reset=True))
        batch = await call.read()
        assert (batch.sequence_number, batch.HasField("snapshot"), batch.timestamp > 1e9) == (2, False, True)
        (event,) = batch.events
        assert event.event_id == 1
        assert not event.stored.HasField("parent_block_hash")
        assert [each.block_hash for each in event.stored.blocks] == [block_hash(digest(1)), block_hash(digest(2))]
        assert list(event.stored.blocks[1].token_ids) == [200 + i for i in range(16)]
        assert event.stored.blocks[0].block_size == 16
        tell(decode, events(page(2, 1), page(3, 2), reset=True))
        (event,) = (await call.read()).events
        assert event.stored.parent_block_hash == block_hash(digest(2))
        assert [each.block_hash for each in event.stored.blocks] == [block_hash(digest(3))]
        tell(prefill, events(evicted=(1, 2)))
        batch = await call.read()
        assert batch.sequence_number == 4
        assert list(batch.events[0].removed.block_hashes) == [block_hash(digest(1))]  # d0 has the other one
        await decode.stop()
        batch = await call.read()
        assert {*batch.events[0].removed.block_hashes} == {block_hash(digest(2)), block_hash(digest(3))}
        second = it.stub.SubscribeKvEvents(pb.SubscribeKvEventsRequest())
        assert (await second.read()).snapshot.blocks == 0
        call.cancel()
        second.cancel()
        await until(lambda: watches(prefill) == [True, False])
        assert not it.it.gateway.fleet.blocks.watched


async def test_a_worker_that_joins_later_tells_too(tiny_llama_dir: Path) -> None:
    prefill, decode = StandIn("prefill", "p0"), StandIn("decode", "d0")
    async with engine(tiny_llama_dir, prefill, decode) as it:
        call = await subscribed(it, prefill, decode)
        await prefill.stop()
        await until(lambda: len(it.it.gateway.fleet.loads()) == 1)
        await prefill.start(prefill.address)
        await until(lambda: watches(prefill) == [True, True])
        call.cancel()
        await until(lambda: watches(prefill) == [True, True, False])


async def test_a_subscriber_that_does_not_read(tiny_llama_dir: Path) -> None:
    """Costs others nothing and loses its stream; meanwhile there are changes."""
    decode = StandIn("decode", "d0", pages=100_000)
    async with engine(tiny_llama_dir, decode, slow_reader_s=0.5) as it, open_channel(it.it.address) as channel:
        lazy = vllm_engine_pb2_grpc.VllmEngineStub(channel).SubscribeKvEvents(pb.SubscribeKvEventsRequest())
        call = await subscribed(it, decode)
        for start in range(0, 10_000, 1000):
            tell(decode, events(*(page(number) for number in range(start, start + 1000))))
        seen = 0
        async with asyncio.timeout(20):
            while seen < 10_000:
                seen += sum(len(event.stored.blocks) for event in (await call.read()).events)
        await until(lambda: len(it.it.gateway.fleet.blocks.followers) == 1)

        async def rest() -> None:
            while await lazy.read() is not grpc.aio.EOF:
                pass

        assert (await refusal(rest())).code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        call.cancel()
        again = it.stub.SubscribeKvEvents(pb.SubscribeKvEventsRequest())
        assert (await again.read()).HasField("snapshot")
        again.cancel()


def test_a_snapshot_comes_in_pieces_parents_first() -> None:
    blocks = [page(number, number - 1 if number % 100 else None) for number in range(300)]
    batches = list(Stream().snapshot(blocks))
    assert [batch.sequence_number for batch in batches] == [1, 2, 3]
    assert [(b.snapshot.index, b.snapshot.count, b.snapshot.blocks) for b in batches] == [
        (index, 3, 300) for index in range(3)
    ]
    assert batches[0].events[0].WhichOneof("data") == "cleared"
    stored = [event.stored for batch in batches for event in batch.events if event.HasField("stored")]
    assert [len(run.blocks) for run in stored] == [100, BATCH - 100, 72, 56, 44]
    assert [run.HasField("parent_block_hash") for run in stored] == [False, False, True, False, True]
    assert [each.block_hash for run in stored for each in run.blocks] == [block_hash(each.digest) for each in blocks]


def test_live_batches_keep_the_order() -> None:
    stream = Stream()
    changes = [Change(True, page(1)), Change(True, page(2, 1)), Change(False, page(1)), Change(True, page(1))]
    (batch,) = stream.live(changes)
    assert [(event.event_id, event.WhichOneof("data")) for event in batch.events] == [
        (1, "stored"), (2, "removed"), (3, "stored")
    ]  # fmt: skip
    assert [b.sequence_number for b in stream.live([Change(True, page(n)) for n in range(BATCH + 1)])] == [2, 3]
    assert list(stored_runs([])) == []


def test_blocks_of_others_are_told_apart() -> None:
    assert block_hash(bytes([255] * 8)) == -1
    assert block_hash(bytes([1, 0, 0, 0, 0, 0, 0, 0])) == 1
    blocks = CachedBlocks(lambda _: None)
    with blocks.follow(b"") as follower:
        assert blocks.of(follower) == []
    assert block(1).digest == digest(1)
