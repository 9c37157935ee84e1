"""Which pages the workers have cached, with their tokens, for those who follow that; else nothing is kept."""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeAlias

from ...engine.prefix_cache import root_digest
from ...errors import Overloaded
from ...v1 import worker_pb2 as pb
from .prefixes import TOLD_BYTES

MAX_FOLLOWERS = 64
MAX_PENDING = 1 << 16  # changes that wait for a follower who does not take them
TOKEN_BYTES = 4


@dataclass(frozen=True, slots=True)
class Block:
    """A page that at least one worker has. `parent`: the one before it, or `root`, which names model and cache salt."""

    digest: bytes
    root: bytes
    parent: bytes
    tokens: bytes  # 4 bytes each, little-endian


@dataclass(frozen=True, slots=True)
class Change:
    """`stored`: the first worker has it; otherwise the last one that had it has it no more."""

    stored: bool
    block: Block


Watch: TypeAlias = Callable[[bool], None]


class Follower:
    """Gets the changes of one cache salt's pages."""

    def __init__(self, salt: bytes, limit: int = MAX_PENDING) -> None:
        """`limit`: of changes that wait."""
        self.salt = salt
        self._limit = limit
        self._changes: list[Change] = []
        self._lost = True  # at first nothing is known
        self._news = asyncio.Event()
        self._news.set()

    def note(self, change: Change) -> None:
        """Adds a change; too many are given up for a new beginning."""
        self._changes.append(change)
        if len(self._changes) > self._limit:
            self._changes.clear()
            self._lost = True
        self._news.set()

    def restart(self) -> None:
        """What it knows is void."""
        self._changes.clear()
        self._lost = True
        self._news.set()

    async def take(self) -> list[Change] | None:
        """The changes since the last call, in order; waits for some. None: it must begin anew, with all that there is
        now."""
        await self._news.wait()
        self._news.clear()
        changes, self._changes = self._changes, []
        lost, self._lost = self._lost, False
        return None if lost else changes


class CachedBlocks:
    """The union over a gateway's workers. One loop owns it."""

    def __init__(self, on_watch: Watch) -> None:
        """`on_watch` is told when somebody begins to follow, and when nobody does any more."""
        self._on_watch = on_watch
        self._followers: dict[Follower, bytes] = {}  # and the root of its salt
        self._of: dict[int, set[bytes]] = {}  # by worker
        self._workers: Counter[bytes] = Counter()  # that have a page
        self._blocks: dict[bytes, Block] = {}
        self._cache_root = b""

    @property
    def watched(self) -> bool:
        """Whether anybody follows."""
        return bool(self._followers)

    @property
    def followers(self) -> tuple[Follower, ...]:
        """Who follows."""
        return tuple(self._followers)

    def __len__(self) -> int:
        return len(self._blocks)

    @contextmanager
    def follow(self, salt: bytes) -> Iterator[Follower]:
        """For the time of the `with` block. Overloaded where too many do."""
        if len(self._followers) >= MAX_FOLLOWERS:
            raise Overloaded(f"{MAX_FOLLOWERS} subscribers follow the prefix caches already")
        first = not self.watched
        follower = Follower(salt)
        self._followers[follower] = _root(self._cache_root, salt)
        if first:
            self._on_watch(True)
        try:
            yield follower
        finally:
            del self._followers[follower]
            if not self.watched:
                self._on_watch(False)
                self._forget()

    def of(self, follower: Follower) -> list[Block]:
        """All pages of its salt, each after the one before it, where that one is there."""
        root = self._followers[follower]
        mine = {digest: block for digest, block in self._blocks.items() if block.root == root}
        return list(_in_order(mine))

    def apply(self, worker: int, events: pb.CacheEvents, *, cache_root: bytes, page_size: int, limit: int) -> None:
        """Takes what a worker told. `limit`: of pages; nothing is kept of one that tells more than it can have, or
        nonsense."""
        if not self.watched:
            return
        self._meet(cache_root)
        if events.reset:
            self.gone(worker)
        has = self._of.setdefault(worker, set())
        for digest in _split(events.evicted, TOLD_BYTES):
            if digest in has:
                has.discard(digest)
                self._lose(digest)
        for block in _read(events, page_size):
            if block.digest not in has:
                has.add(block.digest)
                self._gain(block)
        if len(has) > limit:
            self.gone(worker)

    def gone(self, worker: int) -> None:
        """It has nothing any more."""
        for digest in self._of.pop(worker, ()):
            self._lose(digest)

    def _gain(self, block: Block) -> None:
        self._workers[block.digest] += 1
        if self._workers[block.digest] == 1:
            self._blocks[block.digest] = block
            self._tell(Change(True, block))

    def _lose(self, digest: bytes) -> None:
        self._workers[digest] -= 1
        if not self._workers[digest]:
            del self._workers[digest]
            self._tell(Change(False, self._blocks.pop(digest)))

    def _tell(self, change: Change) -> None:
        for follower, root in self._followers.items():
            if root == change.block.root:
                follower.note(change)

    def _meet(self, cache_root: bytes) -> None:
        """All workers of a fleet have one model and format; a later fleet may have others."""
        if cache_root != self._cache_root:
            self._cache_root = cache_root
            for follower in self._followers:
                self._followers[follower] = _root(cache_root, follower.salt)
                if self._blocks:  # of the old one: that they go will not be told
                    follower.restart()

    def _forget(self) -> None:
        self._of.clear()
        self._workers.clear()
        self._blocks.clear()


def _root(cache_root: bytes, salt: bytes) -> bytes:
    return root_digest(cache_root, salt)[:TOLD_BYTES]


def _read(events: pb.CacheEvents, page_size: int) -> Iterator[Block]:
    """What it tells as stored, with contents; nothing where the parts do not fit together."""
    size = page_size * TOKEN_BYTES
    digests = _split(events.stored, TOLD_BYTES)
    if not len(digests) * TOLD_BYTES == len(events.roots) == len(events.parents):
        return
    if len(digests) * size != len(events.tokens):
        return
    parts = zip(
        digests,
        _split(events.roots, TOLD_BYTES),
        _split(events.parents, TOLD_BYTES),
        _split(events.tokens, size),
        strict=True,
    )
    for digest, root, parent, tokens in parts:
        yield Block(digest, root, parent, tokens)


def _split(packed: bytes, size: int) -> list[bytes]:
    return [packed[at : at + size] for at in range(0, len(packed) - len(packed) % size, size)]


def _in_order(blocks: dict[bytes, Block]) -> Iterator[Block]:
    """Each after its parent, if that is there."""
    done: set[bytes] = set()
    for digest in blocks:
        chain: list[bytes] = []
        while digest in blocks and digest not in done:
            done.add(digest)
            chain.append(digest)
            digest = blocks[digest].parent
        yield from (blocks[each] for each in reversed(chain))
