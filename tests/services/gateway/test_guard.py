"""The guard ends a request from outside."""

import asyncio

import pytest

from twostroke.engine.request import FinishReason
from twostroke.errors import DeadlineExceeded, Overloaded, Unavailable
from twostroke.services.gateway.generation import Finish, Piece, Timings
from twostroke.services.gateway.guard import Guard

PIECE = Piece(0, [1], "x", [])
LAST = Piece(1, [2], "y", [], Finish(FinishReason.STOP, "", 1, 0, 2, Timings(), 0, "p", "d"))


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


class Door:
    """Writes that go through when it opens; `left`: pieces that went out whole."""

    def __init__(self) -> None:
        self.open, self.writing = asyncio.Event(), asyncio.Event()
        self.left: list[Piece] = []

    async def send(self, piece: Piece) -> None:
        self.writing.set()
        await self.open.wait()
        self.left.append(piece)


@pytest.mark.parametrize("way", ["told", "deadline"])
async def test_a_message_that_is_being_written_is_let_out_first(way: str) -> None:
    door, guard = Door(), Guard(0.05 if way == "deadline" else None, 60, alone=True)

    async def body() -> None:
        async with guard.watching():
            while True:
                await guard.write(door.send, PIECE)

    task = asyncio.create_task(body())
    await door.writing.wait()
    if way == "told":
        guard.end(Unavailable("down"))
    await asyncio.sleep(0.1)
    assert not task.done()
    door.open.set()
    with pytest.raises(Unavailable if way == "told" else DeadlineExceeded):
        await task
    assert door.left == [PIECE]


async def test_an_answer_whose_last_message_was_being_written_has_ended_well() -> None:
    door, guard = Door(), Guard(None, 60, alone=True)

    async def body() -> None:
        async with guard.watching():
            await guard.write(door.send, LAST)

    task = asyncio.create_task(body())
    await door.writing.wait()
    guard.end(Unavailable("down"))
    door.open.set()
    await task
    assert door.left == [LAST]


async def test_of_several_answers_none_is_written_after_the_end() -> None:
    door, guard = Door(), Guard(None, 60)

    async def body() -> None:
        async with guard.watching(), asyncio.TaskGroup() as group:
            for piece in (LAST, PIECE, PIECE):
                group.create_task(guard.write(door.send, piece))
            group.create_task(asyncio.Event().wait())

    task = asyncio.create_task(body())
    await door.writing.wait()
    guard.end(Unavailable("down"))
    door.open.set()
    with pytest.raises((Unavailable, ExceptionGroup)):
        await task
    assert door.left == [LAST]


async def test_one_that_fails_waits_for_what_its_sibling_writes_and_nobody_writes_after_it() -> None:
    door, guard = Door(), Guard(None, 60)
    writing = asyncio.create_task(guard.write(door.send, PIECE))
    await door.writing.wait()
    failing = asyncio.create_task(guard.still())
    await asyncio.sleep(0.01)
    later = asyncio.create_task(guard.write(door.send, LAST))
    assert not failing.done()
    door.open.set()
    await failing
    await writing
    assert door.left == [PIECE]
    assert not later.done()
    later.cancel()
    await asyncio.gather(later, return_exceptions=True)


async def test_what_nobody_reads_is_waited_for_no_longer_than_a_while() -> None:
    guard = Guard(None, 60)
    body = asyncio.create_task(guard.write(forever, PIECE))
    await asyncio.sleep(0)
    async with asyncio.timeout(20):
        await guard.still()
    body.cancel()
    await asyncio.gather(body, return_exceptions=True)
