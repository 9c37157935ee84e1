"""The guard ends a request from outside."""

import asyncio

import pytest

from twostroke.errors import DeadlineExceeded, Overloaded, Unavailable
from twostroke.services.gateway.generation import Piece
from twostroke.services.gateway.guard import Guard

PIECE = Piece(0, [1], "x", [])


async def forever(_: Piece) -> None:
    await asyncio.Event().wait()


async def quick(_: Piece) -> None:
    pass


async def test_the_deadline_ends_the_body() -> None:
    with pytest.raises(DeadlineExceeded):
        async with Guard(0.01, 60).watching():
            await asyncio.Event().wait()


async def test_no_deadline() -> None:
    async with Guard(None, 60).watching():
        await asyncio.sleep(0)


async def test_a_write_that_takes_too_long_ends_it() -> None:
    guard = Guard(None, 0.02)

    async def body() -> None:
        async with guard.watching():
            await guard.write(quick, PIECE)
            await guard.write(forever, PIECE)

    with pytest.raises(Overloaded):
        await body()


async def test_quick_writes_and_pauses_between_them_do_not() -> None:
    guard = Guard(None, 0.02)
    async with guard.watching():
        for _ in range(4):
            await guard.write(quick, PIECE)
            await asyncio.sleep(0.015)
        await asyncio.sleep(0.05)


async def test_end_gives_its_error_from_wherever() -> None:
    guard = Guard(60, 60)
    asyncio.get_running_loop().call_soon(guard.end, Unavailable("down"))
    with pytest.raises(Unavailable, match="down"):
        async with guard.watching():
            await guard.write(forever, PIECE)
    guard.end(Unavailable("late"))


async def test_the_first_end_counts() -> None:
    guard = Guard(None, 60)

    async def body() -> None:
        async with guard.watching():
            guard.end(Unavailable("first"))
            guard.too_slow()
            await asyncio.sleep(1)

    with pytest.raises(Unavailable, match="first"):
        await body()


async def test_the_body_s_own_errors_and_a_cancel_pass() -> None:
    with pytest.raises(TimeoutError):
        async with Guard(60, 60).watching():
            raise TimeoutError
    task = asyncio.create_task(_watched())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def _watched() -> None:
    async with Guard(60, 60).watching():
        await asyncio.Event().wait()
