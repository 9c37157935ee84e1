"""Turns of streams to write."""

import asyncio
from collections import Counter

from twostroke.services.gateway.turns import SHARE, Turns


async def test_so_many_at_once_then_the_loop_comes_round() -> None:
    turns = Turns(3)
    assert [turns.now() for _ in range(5)] == [True] * 3 + [False] * 2
    await asyncio.sleep(0)
    assert [turns.now() for _ in range(4)] == [True] * 3 + [False]


async def test_those_who_wait_come_in_order_and_before_those_who_ask_later() -> None:
    turns, came = Turns(2), list[int]()

    async def ask(number: int) -> None:
        if not turns.now():
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            turns.queue(waiter)
            await waiter
        came.append(number)

    await asyncio.gather(*(ask(number) for number in range(9)))
    assert came == list(range(9))
    assert turns.now()


async def test_a_turn_of_one_that_left_goes_to_the_next() -> None:
    turns = Turns(1)
    loop = asyncio.get_running_loop()
    waiters: list[asyncio.Future[None]] = [loop.create_future() for _ in range(3)]
    for waiter in waiters:
        turns.queue(waiter)
    waiters[0].cancel()
    await asyncio.sleep(0)
    assert waiters[1].done()
    assert not waiters[2].done()
    await asyncio.sleep(0)
    assert waiters[2].done()


async def test_nobody_starves_among_streams_that_always_have_something() -> None:
    turns, taken, stop = Turns(4), Counter[int](), asyncio.Event()

    async def stream(number: int) -> None:
        while not stop.is_set():
            if not turns.now():
                waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
                turns.queue(waiter)
                await waiter
            taken[number] += 1
            await asyncio.sleep(0)  # it writes
            if taken[number] == 50:
                stop.set()

    await asyncio.gather(*(stream(number) for number in range(30)))
    assert max(taken.values()) - min(taken.values()) <= 2


async def test_an_idle_loop_is_left_alone() -> None:
    turns = Turns(2)
    turns.now()
    for _ in range(3):
        await asyncio.sleep(0)
    assert not turns._called


async def test_where_very_many_wait_more_go_at_once() -> None:
    turns = Turns(2)
    loop = asyncio.get_running_loop()
    waiters: list[asyncio.Future[None]] = [loop.create_future() for _ in range(10 * SHARE)]
    for waiter in waiters:
        turns.queue(waiter)
    await asyncio.sleep(0)
    assert [waiter.done() for waiter in waiters] == [True] * 10 + [False] * (len(waiters) - 10)
