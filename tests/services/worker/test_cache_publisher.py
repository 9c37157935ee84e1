"""Telling gateways of a prefix cache: everything once, then changes, in pieces, never at the cost of tokens."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from twostroke.engine.cache_changes import Changes
from twostroke.engine.prefix_cache import PageContent, PrefixCache
from twostroke.errors import Unavailable
from twostroke.services.identity import draw_identity
from twostroke.services.worker.cache_publisher import CHUNK, CHUNK_CONTENTS, CachePublisher, messages
from twostroke.services.worker.session import MAX_BACKLOG, Session
from twostroke.v1 import worker_pb2 as pb


def digest(number: int) -> bytes:
    return number.to_bytes(8, "big") * 2


class Inline:
    """Stands for the driver: runs at once."""

    ended = False

    async def call(self, fn: Callable[[], Any]) -> Any:
        if self.ended:
            raise Unavailable("ended")
        return fn()


class Reader:
    def __init__(self, *, wants_contents: bool = False) -> None:
        self.knows_cache = False
        self.wants_contents = wants_contents
        self.told: list[pb.CacheEvents] = []
        self.flushed = 0

    def tell_cache(self, events: pb.CacheEvents) -> None:
        self.told.append(events)

    def flush_cache(self) -> None:
        self.flushed += 1


def test_messages_are_bounded_and_say_nothing_of_nothing() -> None:
    assert list(messages(Changes(False, [], []))) == []
    (reset,) = messages(Changes(True, [], []))
    assert reset == pb.CacheEvents(reset=True)
    parts = list(messages(Changes(True, [digest(i) for i in range(CHUNK + 1)], [digest(7)])))
    assert [part.reset for part in parts] == [True, False]
    assert [len(part.stored) for part in parts] == [8 * CHUNK, 8]
    assert parts[0].evicted == digest(7)[:8]


async def test_the_newcomer_is_told_everything_and_the_others_what_changed() -> None:
    prefix, early, late = PrefixCache(), Reader(), Reader()
    publisher = CachePublisher(Inline(), prefix)  # type: ignore[arg-type]
    prefix.add(1, digest(1))
    await publisher.publish([early])
    assert early.told == [pb.CacheEvents(reset=True, stored=digest(1)[:8])]
    prefix.add(2, digest(2))
    prefix.forget(1)
    await publisher.publish([early, late])
    assert early.told[1:] == [pb.CacheEvents(stored=digest(2)[:8], evicted=digest(1)[:8])]
    assert late.told == [pb.CacheEvents(reset=True, stored=digest(2)[:8])]
    await publisher.publish([early, late])
    assert (len(early.told), len(late.told)) == (2, 1)


def content(number: int) -> PageContent:
    return PageContent(digest(0), digest(number - 1), number.to_bytes(4, "little") * 2)


async def test_what_pages_hold_is_told_to_those_who_want_it() -> None:
    prefix, plain, watching = PrefixCache(), Reader(), Reader(wants_contents=True)
    publisher = CachePublisher(Inline(), prefix)  # type: ignore[arg-type]
    prefix.add(1, digest(1), content(1))
    prefix.add(2, digest(2))  # nothing was said of it
    await publisher.publish([plain, watching])
    assert plain.told == [pb.CacheEvents(reset=True, stored=digest(1)[:8] + digest(2)[:8])]
    assert watching.told == [
        pb.CacheEvents(
            reset=True, stored=digest(1)[:8], roots=digest(0)[:8], parents=digest(0)[:8], tokens=bytes([1, 0, 0, 0] * 2)
        )
    ]
    prefix.forget(1)
    prefix.add(3, digest(3), content(3))
    await publisher.publish([watching])
    assert watching.told[1].evicted == digest(1)[:8]
    assert (watching.told[1].stored, watching.told[1].parents) == (digest(3)[:8], digest(2)[:8])
    assert watching.flushed == 2
    assert prefix.content_of(digest(1)) is None


def test_pieces_with_contents_are_smaller() -> None:
    stored = [digest(i) for i in range(1, CHUNK_CONTENTS + 2)]
    contents = {digest(i): content(i) for i in range(1, CHUNK_CONTENTS + 2)}
    parts = list(messages(Changes(True, stored, []), contents))
    assert [part.reset for part in parts] == [True, False]
    assert [len(part.tokens) for part in parts] == [8 * CHUNK_CONTENTS, 8]


async def test_it_ends_with_the_engine() -> None:
    driver = Inline()
    driver.ended = True
    async with asyncio.timeout(10):
        await CachePublisher(driver, PrefixCache()).run(lambda: [])  # type: ignore[arg-type]


class Owner:
    def clock(self) -> float:
        return 0.0


@pytest.mark.parametrize("room", [100, 1 << 16])
async def test_a_session_without_room_is_told_anew_later(room: int) -> None:
    session = Session(draw_identity("gateway", "here"), Owner(), room)  # type: ignore[arg-type]
    session.knows_cache = True
    for _ in range(2):
        session.tell_cache(pb.CacheEvents(stored=bytes(80)))
    assert session.knows_cache is (room > 100)
    assert session.outbox.empty is (room == 100)
    assert not session.ended.done()


async def test_a_session_keeps_what_pages_hold_until_there_is_room() -> None:
    session = Session(draw_identity("gateway", "here"), Owner(), 1000)  # type: ignore[arg-type]
    session.knows_cache = True
    session.receive(pb.ToWorker(watch_cache=pb.WatchCache(contents=True)))
    assert (session.wants_contents, session.knows_cache) == (True, False)
    session.knows_cache = True
    told = [pb.CacheEvents(stored=bytes([i]) * 8, tokens=bytes(292)) for i in range(4)]
    for events in told:
        session.tell_cache(events)
    assert session.knows_cache
    received = []
    while not session.outbox.empty:
        taken = await session.outbox.take()
        assert taken is not None
        received.append(taken[0].cache)
        session.outbox.written(taken[1])
        session.flush_cache()
    assert received == told
    for _ in range(MAX_BACKLOG + 5):
        session.tell_cache(told[0])
    assert not session.knows_cache  # all anew, later
    session.receive(pb.ToWorker(watch_cache=pb.WatchCache()))
    assert not session.wants_contents
