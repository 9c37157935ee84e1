"""The union of what workers have cached: first and last holders, salts apart, followers that do not keep up."""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twostroke.engine.prefix_cache import root_digest
from twostroke.errors import Overloaded
from twostroke.services.gateway.cached_blocks import MAX_FOLLOWERS, Block, CachedBlocks, Change, Follower
from twostroke.v1 import worker_pb2 as pb

CACHE_ROOT = b"model/float32/2"
ROOT = root_digest(CACHE_ROOT, b"")[:8]
SALTED = root_digest(CACHE_ROOT, b"salt")[:8]


def digest(number: int) -> bytes:
    return number.to_bytes(8, "big")


def block(number: int, parent: int | None = None, root: bytes = ROOT) -> Block:
    return Block(digest(number), root, root if parent is None else digest(parent), bytes([number, 0, 0, 0, 1, 0, 0, 0]))


def events(*stored: Block, evicted: tuple[int, ...] = (), reset: bool = False) -> pb.CacheEvents:
    return pb.CacheEvents(
        reset=reset,
        stored=b"".join(each.digest for each in stored),
        roots=b"".join(each.root for each in stored),
        parents=b"".join(each.parent for each in stored),
        tokens=b"".join(each.tokens for each in stored),
        evicted=b"".join(map(digest, evicted)),
    )


def apply(blocks: CachedBlocks, worker: int, told: pb.CacheEvents, limit: int = 100) -> None:
    blocks.apply(worker, told, cache_root=CACHE_ROOT, page_size=2, limit=limit)


async def new(blocks: CachedBlocks, follower: Follower) -> list[Change]:
    """What it is told; it is not told to begin anew."""
    async with asyncio.timeout(1):
        changes = await follower.take()
    assert changes is not None
    return changes


async def test_a_page_is_there_from_its_first_worker_to_its_last() -> None:
    watched: list[bool] = []
    blocks = CachedBlocks(watched.append)
    apply(blocks, 1, events(block(1)))
    assert (len(blocks), watched) == (0, [])  # nobody follows
    with blocks.follow(b"") as follower:
        assert (blocks.watched, watched) == (True, [True])
        apply(blocks, 1, events(block(1), block(2, 1), reset=True))
        assert await follower.take() is None
        assert blocks.of(follower) == [block(1), block(2, 1)]
        apply(blocks, 2, events(block(2, 1), block(3, 2)))
        assert await new(blocks, follower) == [Change(True, block(3, 2))]
        apply(blocks, 1, events(evicted=(2, 1, 77)))
        assert await new(blocks, follower) == [Change(False, block(1))]
        blocks.gone(2)
        assert {change.block.digest for change in await new(blocks, follower)} == {digest(2), digest(3)}
        blocks.gone(2)
        assert blocks.of(follower) == []
        with blocks.follow(b""):
            pass
        assert watched == [True]
        apply(blocks, 1, events(block(1)))
    assert (len(blocks), watched) == (0, [True, False])


async def test_followers_see_pages_of_their_own_salt() -> None:
    blocks = CachedBlocks(lambda _: None)
    with blocks.follow(b"") as plain, blocks.follow(b"salt") as salted:
        apply(blocks, 1, events(block(1), block(2, root=SALTED), block(3, 2, SALTED)))
        assert await plain.take() is None
        assert await salted.take() is None
        assert blocks.of(plain) == [block(1)]
        assert blocks.of(salted) == [block(2, root=SALTED), block(3, 2, SALTED)]
        apply(blocks, 1, events(evicted=(3,)))
        assert await new(blocks, salted) == [Change(False, block(3, 2, SALTED))]
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(plain.take(), 0.02)


async def test_a_worker_that_begins_anew_has_what_it_tells_then() -> None:
    blocks = CachedBlocks(lambda _: None)
    with blocks.follow(b"") as follower:
        apply(blocks, 1, events(block(1), block(2, 1)))
        await follower.take()
        apply(blocks, 1, events(block(2, 1), reset=True))
        assert blocks.of(follower) == [block(2, 1)]


async def test_nonsense_is_not_kept() -> None:
    blocks = CachedBlocks(lambda _: None)
    with blocks.follow(b"") as follower:
        await follower.take()
        for wrong in (
            pb.CacheEvents(stored=digest(1)),
            pb.CacheEvents(stored=digest(1), roots=ROOT, parents=ROOT, tokens=bytes(7)),
            pb.CacheEvents(stored=digest(1) + b"x", roots=ROOT, parents=ROOT + ROOT, tokens=bytes(8)),
        ):
            apply(blocks, 1, wrong)
            assert len(blocks) == 0
        apply(blocks, 1, events(*(block(number) for number in range(5))), limit=4)
        assert len(blocks) == 0  # more pages than it has


async def test_a_follower_that_does_not_keep_up_begins_anew() -> None:
    follower = Follower(b"", limit=3)
    assert await follower.take() is None
    for number in range(3):
        follower.note(Change(True, block(number)))
    assert len(await follower.take() or ()) == 3
    for number in range(5):
        follower.note(Change(True, block(number)))
    assert await follower.take() is None


async def test_another_model_begins_anew() -> None:
    blocks = CachedBlocks(lambda _: None)
    with blocks.follow(b"") as follower:
        apply(blocks, 1, events(block(1)))
        await follower.take()
        other = root_digest(b"other", b"")[:8]
        blocks.apply(2, events(block(1, root=other)), cache_root=b"other", page_size=2, limit=9)
        assert await follower.take() is None
        assert blocks.of(follower) == []  # its digest stands for another page while that one is there
        blocks.gone(1)
        blocks.apply(3, events(block(2, root=other)), cache_root=b"other", page_size=2, limit=9)
        assert blocks.of(follower) == [block(2, root=other)]


def test_there_is_room_for_so_many() -> None:
    async def run() -> None:
        blocks = CachedBlocks(lambda _: None)
        held = [blocks.follow(b"") for _ in range(MAX_FOLLOWERS)]
        for each in held:
            each.__enter__()
        with pytest.raises(Overloaded), blocks.follow(b""):
            pass
        for each in held:
            each.__exit__(None, None, None)
        assert not blocks.watched

    asyncio.run(run())


STEP = st.tuples(st.integers(1, 3), st.lists(st.integers(0, 9), max_size=4), st.lists(st.integers(0, 9), max_size=4),
                 st.sampled_from(["tell", "tell", "tell", "reset", "gone"]))  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(steps=st.lists(STEP, max_size=25), looks=st.sets(st.integers(0, 25)))
def test_a_follower_knows_the_union(steps: list[tuple[int, list[int], list[int], str]], looks: set[int]) -> None:
    """Whatever workers tell, and whenever it looks."""

    async def run() -> None:
        blocks = CachedBlocks(lambda _: None)
        has: dict[int, set[int]] = {1: set(), 2: set(), 3: set()}
        known: set[bytes] = set()
        with blocks.follow(b"") as follower:
            for index, (worker, stored, evicted, kind) in enumerate([*steps, (1, [], [], "tell")]):
                if kind == "gone":
                    blocks.gone(worker)
                    has[worker].clear()
                else:
                    told = events(*(block(n, n - 1 if n else None) for n in stored), evicted=tuple(evicted))
                    told.reset = kind == "reset"
                    apply(blocks, worker, told)
                    has[worker] = ((set() if kind == "reset" else has[worker]) - set(evicted)) | set(stored)
                if index in looks or index == len(steps):
                    follower.note(Change(False, Block(b"nobody", ROOT, ROOT, b"")))  # so that it need not wait
                    changes = await follower.take()
                    if changes is None:
                        known = {each.digest for each in blocks.of(follower)}
                        continue
                    for change in changes:
                        (known.add if change.stored else known.discard)(change.block.digest)
            assert known == {digest(n) for each in has.values() for n in each}
            order = [each.digest for each in blocks.of(follower)]
            for position, each in enumerate(blocks.of(follower)):
                assert each.parent not in order[position + 1 :], "after the one before it"

    asyncio.run(run())
