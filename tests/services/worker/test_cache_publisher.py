"""Telling gateways of a prefix cache: everything once, then changes, in pieces, never at the cost of tokens."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from twostroke.engine.cache_changes import Changes
from twostroke.engine.prefix_cache import PrefixCache
from twostroke.errors import Unavailable
from twostroke.services.identity import draw_identity
from twostroke.services.worker.cache_publisher import CHUNK, CachePublisher, messages
from twostroke.services.worker.session import Session
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
    def __init__(self) -> None:
        self.knows_cache = False
        self.told: list[pb.CacheEvents] = []

    def tell_cache(self, events: pb.CacheEvents) -> None:
        self.told.append(events)


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
