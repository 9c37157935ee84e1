"""Requests on their way have places, shared among callers; the slowest give way where others wait."""

import asyncio
from contextlib import AsyncExitStack

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twostroke.errors import Overloaded
from twostroke.services.gateway.arrivals import Arrivals
from twostroke.services.gateway.callers import OpenCalls, Share, caller_of
from twostroke.services.security.tenant import Tenant, serving

from ..cluster import until


class Request:
    """One on its way, by a task of its own."""

    def __init__(self, arrivals: Arrivals, caller: str) -> None:
        self.here = asyncio.Event()  # it has a place
        self.whole = asyncio.Event()
        self.task = asyncio.create_task(self._come(arrivals, caller))

    async def _come(self, arrivals: Arrivals, caller: str) -> None:
        async with arrivals.place(caller):
            self.here.set()
            await self.whole.wait()


async def test_who_has_most_leaves_a_quarter_and_waits_for_its_own() -> None:
    arrivals = Arrivals(8, patience_s=60)
    mine = [Request(arrivals, "a") for _ in range(9)]
    await until(lambda: arrivals.waiting == 3)
    assert [request.here.is_set() for request in mine] == [True] * 6 + [False] * 3
    other = Request(arrivals, "b")
    await asyncio.wait_for(other.here.wait(), 10)
    mine[0].whole.set()
    await asyncio.wait_for(mine[6].here.wait(), 10)
    mine[7].task.cancel()  # while it waits
    mine[1].task.cancel()  # while it is on its way
    await asyncio.wait_for(mine[8].here.wait(), 10)
    for request in (*mine, other):
        request.whole.set()
    await asyncio.gather(*(request.task for request in (*mine, other)), return_exceptions=True)
    assert (arrivals.taken, arrivals.waiting) == (0, 0)


async def test_the_oldest_of_who_has_most_gives_way_and_only_where_others_wait() -> None:
    arrivals = Arrivals(4, patience_s=0.2)
    few = Request(arrivals, "b")
    await few.here.wait()
    many = [Request(arrivals, "a") for _ in range(3)]
    await many[2].here.wait()
    await asyncio.sleep(0.5)
    assert not any(request.task.done() for request in (*many, few))  # nobody waits
    last = Request(arrivals, "c")
    await asyncio.wait_for(last.here.wait(), 10)
    with pytest.raises(Overloaded, match="gave way") as told:
        await many[0].task
    assert told.value.retry_after_s == 0.2
    assert not any(request.task.done() for request in (*many[1:], few))
    for request in (*many[1:], few, last):
        request.whole.set()
        await request.task
    assert (arrivals.taken, arrivals.waiting) == (0, 0)


async def test_all_that_wait_come_in_turn_while_none_of_those_before_arrives() -> None:
    arrivals = Arrivals(4, patience_s=0.05)
    stuck = [Request(arrivals, "a") for _ in range(30)]
    for request in stuck:
        await asyncio.wait_for(request.here.wait(), 10)
    others = [Request(arrivals, f"b{i}") for i in range(3)]
    for request in others:
        await asyncio.wait_for(request.here.wait(), 10)
        request.whole.set()
        await request.task
    for request in stuck[-3:]:
        request.whole.set()
    results = await asyncio.gather(*(request.task for request in stuck), return_exceptions=True)
    assert sum(isinstance(result, Overloaded) for result in results) >= 27
    assert (arrivals.taken, arrivals.waiting) == (0, 0)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 6)), max_size=40), st.integers(4, 9))
def test_no_place_is_lost_whoever_leaves_when(steps: list[tuple[str, int]], places: int) -> None:
    """Some are whole soon, some are cancelled in the same moment as others leave."""

    async def play() -> None:
        arrivals = Arrivals(places, patience_s=0)
        requests: list[Request] = []
        for caller, fate in steps:
            requests.append(Request(arrivals, caller))
            for request in requests[fate::5]:
                request.whole.set() if fate % 2 else request.task.cancel()
            if fate in (2, 5):
                await asyncio.sleep(0)
            assert arrivals.taken <= places
        for request in requests:
            request.whole.set()
        await asyncio.gather(*(request.task for request in requests), return_exceptions=True)
        assert (arrivals.taken, arrivals.waiting) == (0, 0)
        async with AsyncExitStack() as held, asyncio.timeout(10):
            for caller in ("a", "b"):
                await held.enter_async_context(arrivals.place(caller))

    asyncio.run(play())


def test_shares() -> None:
    share = Share(8)
    for _ in range(6):
        assert share.free("a")
        share.take("a")
    assert not share.free("a")
    share.take("b")
    share.take("b")
    assert not share.free("c")
    share.give_back("b")
    assert (share.taken, share.free("c"), share.free("a")) == (7, True, False)


def test_callers() -> None:
    assert caller_of("ipv4:10.0.0.1:99") == caller_of("10.0.0.1") == "/10.0.0.1"
    assert caller_of("") == "/"
    with serving(Tenant("10.0.0.1")):
        assert caller_of("ipv4:10.0.0.2:99") == "10.0.0.1"


class Peer:
    def __init__(self, address: str) -> None:
        self._address = address

    def peer(self) -> str:
        return f"ipv4:{self._address}:1"


def test_open_calls_are_counted_and_bounded() -> None:
    calls = OpenCalls(4)

    def open_one(address: str) -> object:
        one = calls.one(Peer(address))  # type: ignore[arg-type]
        one.__enter__()
        return one

    held = [open_one("10.0.0.1") for _ in range(3)]
    with pytest.raises(Overloaded, match="max_calls"):
        open_one("10.0.0.1")
    held.append(open_one("10.0.0.2"))
    with pytest.raises(Overloaded, match="max_calls"):
        open_one("10.0.0.3")
    for one in held:
        one.__exit__(None, None, None)  # type: ignore[attr-defined]
    assert calls.open == 0
