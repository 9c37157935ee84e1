"""Tells gateways what a worker's prefix cache gained and lost, about once a second: they route by it."""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

from ...engine.cache_changes import Changes
from ...engine.prefix_cache import PrefixCache
from ...errors import Unavailable
from ...v1 import worker_pb2 as pb
from .driver import Driver

PUBLISH_S = 1.0
TOLD_BYTES = 8  # of a digest: what is told is a hint
CHUNK = 4096  # digests a message


class Reader(Protocol):
    """A session with a gateway."""

    knows_cache: bool

    def tell_cache(self, events: pb.CacheEvents) -> None:
        """Sends a message."""
        ...


class CachePublisher:
    """On the event loop; it asks the engine's thread."""

    def __init__(self, driver: Driver, prefix: PrefixCache) -> None:
        self._driver = driver
        self._prefix = prefix

    async def run(self, readers: Callable[[], Sequence[Reader]]) -> None:
        """Until cancelled, or until the engine's thread ends."""
        while True:
            await asyncio.sleep(PUBLISH_S)
            try:
                await self.publish(readers())
            except Unavailable:
                return

    async def publish(self, readers: Iterable[Reader]) -> None:
        """Once: all that there is to those who know nothing, the changes to the others."""
        asked = tuple(readers)
        fresh = any(not reader.knows_cache for reader in asked)
        changes, everything = await self._driver.call(lambda: self._collect(fresh))
        for reader in asked:
            told = changes if reader.knows_cache else everything
            reader.knows_cache = True
            for message in messages(told):
                reader.tell_cache(message)

    def _collect(self, fresh: bool) -> tuple[Changes, Changes]:
        """On the engine's thread: both of the same moment."""
        changes = self._prefix.take_changes()
        return changes, self._prefix.everything() if fresh else changes


def messages(changes: Changes) -> Iterator[pb.CacheEvents]:
    """In pieces; nothing where nothing changed."""
    stored, evicted = changes.stored, changes.evicted
    for start in range(0, max(len(stored), len(evicted), int(changes.reset)), CHUNK):
        yield pb.CacheEvents(
            reset=changes.reset and start == 0,
            stored=_packed(stored[start : start + CHUNK]),
            evicted=_packed(evicted[start : start + CHUNK]),
        )


def _packed(digests: list[bytes]) -> bytes:
    return b"".join([digest[:TOLD_BYTES] for digest in digests])
