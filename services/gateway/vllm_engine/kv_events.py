"""SubscribeKvEvents: what the workers' prefix caches hold, as batches of events that a router's index takes."""

import asyncio
import sys
import time
from array import array
from collections.abc import Awaitable, Callable, Iterator, Sequence
from itertools import count, islice
from typing import Any, TypeAlias

import grpc.aio

from ....errors import Overloaded
from ....smg import common_pb2 as pb
from ...security.tenant import current_tenant
from ..cached_blocks import TOKEN_BYTES, Block, CachedBlocks, Change
from ..inference import uninterrupted

BATCH = 128  # blocks a message: making one must not hold up other streams

Write: TypeAlias = Callable[[pb.KvEventBatch], Awaitable[None]]
Context: TypeAlias = grpc.aio.ServicerContext[pb.SubscribeKvEventsRequest, pb.KvEventBatch]


class KvEvents:
    """The RPC."""

    def __init__(self, blocks: CachedBlocks, *, slow_reader_s: float) -> None:
        """`slow_reader_s`: a subscriber that does not read for so long loses its stream."""
        self._blocks = blocks
        self._slow_reader_s = slow_reader_s

    async def run(self, context: Context) -> None:
        """In the call's task, until the client leaves. Only pages of the caller's own cache salt are told: tokens of
        others' prompts are none of its business, and its requests cannot find them."""
        await uninterrupted(context.send_initial_metadata(()))  # routers wait for it
        stream = Stream()
        with self._blocks.follow(current_tenant().cache_salt()) as follower:
            while True:
                changes = await follower.take()
                batches = stream.snapshot(self._blocks.of(follower)) if changes is None else stream.live(changes)
                for batch in batches:
                    await self._write(context, batch)

    async def _write(self, context: Context, batch: pb.KvEventBatch) -> None:
        scope = asyncio.timeout(self._slow_reader_s)
        try:
            async with scope:
                await context.write(batch)
        except TimeoutError:
            if not scope.expired():
                raise
            raise Overloaded("the client reads too slowly") from None


class Stream:
    """Numbers batches and events, from 1: to a subscriber 0 says that it has none."""

    def __init__(self) -> None:
        self._batches = count(1)
        self._events = count(1)

    def snapshot(self, blocks: Sequence[Block]) -> Iterator[pb.KvEventBatch]:
        """Replaces whatever the subscriber knew; at least one batch."""
        pieces = max(1, -(-len(blocks) // BATCH))
        for index in range(pieces):
            batch = self._batch()
            batch.snapshot.CopyFrom(pb.KvSnapshotChunk(index=index, count=pieces, blocks=len(blocks)))
            if index == 0:
                batch.events.append(pb.KvCacheEvent(cleared=pb.KvCacheCleared()))
            piece = blocks[index * BATCH : (index + 1) * BATCH]
            batch.events.extend(pb.KvCacheEvent(stored=stored) for stored in stored_runs(piece))
            yield batch

    def live(self, changes: Sequence[Change]) -> Iterator[pb.KvEventBatch]:
        """What changed, in order."""
        rest = iter(changes)
        while piece := list(islice(rest, BATCH)):
            batch = self._batch()
            for event in _events(piece):
                event.event_id = next(self._events)
                batch.events.append(event)
            yield batch

    def _batch(self) -> pb.KvEventBatch:
        return pb.KvEventBatch(sequence_number=next(self._batches), timestamp=time.time(), dp_rank=0)


def _events(changes: Sequence[Change]) -> Iterator[pb.KvCacheEvent]:
    """Neighbours of a kind are told at once."""
    start = 0
    for end in range(1, len(changes) + 1):
        if end < len(changes) and changes[end].stored == changes[start].stored:
            continue
        blocks = [change.block for change in changes[start:end]]
        if changes[start].stored:
            yield from (pb.KvCacheEvent(stored=stored) for stored in stored_runs(blocks))
        else:
            removed = pb.KvBlocksRemoved(block_hashes=[block_hash(block.digest) for block in blocks])
            yield pb.KvCacheEvent(removed=removed)
        start = end


def stored_runs(blocks: Sequence[Block]) -> Iterator[pb.KvBlocksStored]:
    """Blocks that follow one another go together."""
    run: pb.KvBlocksStored | None = None
    before = b""
    for block in blocks:
        if run is None or block.parent != before:
            if run is not None:
                yield run
            run = pb.KvBlocksStored()
            if block.parent != block.root:
                run.parent_block_hash = block_hash(block.parent)
        run.blocks.append(_block(block))
        before = block.digest
    if run is not None:
        yield run


def block_hash(digest: bytes) -> int:
    """64 bits with a sign."""
    return int.from_bytes(digest, "little", signed=True)


def _block(block: Block) -> pb.KvBlock:
    tokens: array[Any] = array("I")
    tokens.frombytes(block.tokens)
    if sys.byteorder == "big":
        tokens.byteswap()
    return pb.KvBlock(
        block_hash=block_hash(block.digest), token_ids=tokens, block_size=len(block.tokens) // TOKEN_BYTES
    )
