"""Messages that are begun at once and waited for with the next one."""

import asyncio
from typing import Any

import pytest

from twostroke.services.gateway.write_behind import WriteBehind


class Transport:
    """Takes messages; each is written when its futures are done."""

    def __init__(self, futures: int = 1) -> None:
        self.begun: list[str] = []
        self.written: list[str] = []
        self.left: list[str] = []  # however that ended
        self.waits: list[asyncio.Future[None]] = []
        self._futures = futures

    async def write(self, message: str) -> None:
        self.begun.append(message)
        try:
            for _ in range(self._futures):
                self.waits.append(asyncio.get_running_loop().create_future())
                await self.waits[-1]
            self.written.append(message)
        finally:
            self.left.append(message)


async def rounds(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_a_message_is_begun_and_not_waited_for() -> None:
    transport = Transport()
    stream = WriteBehind(transport.write)
    await stream.write("a")
    assert (transport.begun, transport.written) == (["a"], [])
    transport.waits[0].set_result(None)
    await stream.settle()
    assert transport.written == ["a"]
    await stream.settle()  # nothing is under way


async def test_the_next_one_waits_for_it() -> None:
    transport = Transport(futures=2)
    stream = WriteBehind(transport.write)
    await stream.write("a")
    second = asyncio.create_task(stream.write("b"))
    await rounds()
    assert transport.begun == ["a"]
    transport.waits[0].set_result(None)
    await rounds()
    assert (transport.begun, len(transport.waits)) == (["a"], 2)
    transport.waits[1].set_result(None)
    await second
    assert (transport.begun, transport.written) == (["a", "b"], ["a"])
    stream.close()


async def test_messages_whose_writing_is_over_meanwhile_go_without_a_wait() -> None:
    transport = Transport()
    stream = WriteBehind(transport.write)
    for number in range(20):
        writing = stream.write(str(number))
        with pytest.raises(StopIteration):
            writing.send(None)  # no wait
        transport.waits[-1].set_result(None)
    await stream.settle()
    assert transport.written == [str(number) for number in range(20)]


@pytest.mark.parametrize("how", ["write", "settle"])
async def test_a_failure_is_told_once_with_what_comes_next(how: str) -> None:
    transport = Transport()
    stream = WriteBehind(transport.write)
    await stream.write("a")
    transport.waits[0].set_exception(OSError("gone"))
    with pytest.raises(OSError, match="gone"):
        await (stream.write("b") if how == "write" else stream.settle())
    assert transport.begun == ["a"]
    await stream.settle()
    await stream.write("c")
    assert transport.begun == ["a", "c"]
    stream.close()


async def test_a_write_that_fails_or_ends_at_once() -> None:
    done: list[str] = []

    async def write(message: str) -> None:
        if message == "bad":
            raise ValueError(message)
        done.append(message)

    stream = WriteBehind(write)
    await stream.write("a")
    with pytest.raises(ValueError, match="bad"):
        await stream.write("bad")
    await stream.write("b")
    await stream.settle()
    assert done == ["a", "b"]


async def test_a_cancel_leaves_the_message_under_way() -> None:
    """A call whose write was broken off takes no further message."""
    transport = Transport()
    stream = WriteBehind(transport.write)
    await stream.write("a")
    waiting: list[asyncio.Task[Any]] = [asyncio.create_task(stream.settle()), asyncio.create_task(stream.write("b"))]
    for task in waiting:
        await rounds()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert not transport.waits[0].cancelled()
    transport.waits[0].set_result(None)
    await stream.write("c")
    assert (transport.begun, transport.written) == (["a", "c"], ["a"])
    stream.close()


async def test_closed_it_is_forgotten() -> None:
    transport = Transport()
    stream = WriteBehind(transport.write)
    await stream.write("a")
    stream.close()
    stream.close()
    assert (transport.written, transport.left) == ([], ["a"])
    transport.waits[0].set_result(None)  # its end comes all the same
    await stream.settle()
