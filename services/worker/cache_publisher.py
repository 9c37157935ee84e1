"""Tells gateways what a worker's prefix cache gained and lost, about once a second: they route by it."""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Protocol, TypeAlias

from ...engine.cache_changes import Changes
from ...engine.prefix_cache import PageContent, PrefixCache
from ...errors import Unavailable
from ...v1 import worker_pb2 as pb
from .driver import Driver

PUBLISH_S = 1.0
TOLD_BYTES = 8  # of a digest: what is told is a hint
CHUNK = 4096  # digests a message
CHUNK_CONTENTS = 64  # of those with contents

Contents: TypeAlias = Mapping[bytes, PageContent]


class Reader(Protocol):
    """A session with a gateway."""

    knows_cache: bool
    wants_contents: bool

    def tell_cache(self, events: pb.CacheEvents) -> None:
        """Sends a message."""
        ...

    def flush_cache(self) -> None:
        """Sends what had no room."""
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
        watched = any(reader.wants_contents for reader in asked)
        changes, everything, contents = await self._driver.call(lambda: self._collect(fresh, watched))
        for reader in asked:
            reader.flush_cache()
            told = changes if reader.knows_cache else everything
            reader.knows_cache = True
            for message in messages(told, contents) if reader.wants_contents else messages(told):
                reader.tell_cache(message)

    def _collect(self, fresh: bool, watched: bool) -> tuple[Changes, Changes, Contents]:
        """On the engine's thread: all of the same moment."""
        changes = self._prefix.take_changes()
        everything = self._prefix.everything() if fresh else changes
        contents: dict[bytes, PageContent] = {}
        for digest in everything.stored if watched else ():
            content = self._prefix.content_of(digest)
            if content is not None:
                contents[digest] = content
        return changes, everything, contents


def messages(changes: Changes, contents: Contents | None = None) -> Iterator[pb.CacheEvents]:
    """In pieces; nothing where nothing changed. With `contents`, only pages that it has are stored."""
    stored, evicted, chunk = changes.stored, changes.evicted, CHUNK
    if contents is not None:
        stored, chunk = [digest for digest in stored if digest in contents], CHUNK_CONTENTS
    for start in range(0, max(len(stored), len(evicted), int(changes.reset)), chunk):
        piece = stored[start : start + chunk]
        message = pb.CacheEvents(
            reset=changes.reset and start == 0,
            stored=_packed(piece),
            evicted=_packed(evicted[start : start + chunk]),
        )
        if contents is not None:
            told = [contents[digest] for digest in piece]
            message.roots = _packed([content.root for content in told])
            message.parents = _packed([content.parent for content in told])
            message.tokens = b"".join([content.tokens for content in told])
        yield message


def _packed(digests: list[bytes]) -> bytes:
    return b"".join([digest[:TOLD_BYTES] for digest in digests])
