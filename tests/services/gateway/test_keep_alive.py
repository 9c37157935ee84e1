"""Signs of life: when they come, and that they never meet a message on its way."""

import asyncio

import pytest

from twostroke.services.gateway.keep_alive import KeepAlive


class Stream:
    """What is written; `open` lets writes through."""

    def __init__(self) -> None:
        self.written: list[str] = []
        self.writing = 0
        self.open = asyncio.Event()
        self.open.set()
        self.changed = asyncio.Condition()
        self.error: Exception | None = None
        self.signs = 0

    async def write(self, message: str) -> None:
        self.writing += 1
        try:
            assert self.writing == 1, "two writes at once"
            await self.open.wait()
            if self.error is not None:
                raise self.error
        finally:
            self.writing -= 1
        async with self.changed:
            self.written.append(message)
            self.changed.notify_all()

    def sign(self) -> str:
        self.signs += 1
        return f"sign {self.signs}"

    async def until(self, count: int) -> None:
        async with asyncio.timeout(20), self.changed:
            await self.changed.wait_for(lambda: len(self.written) >= count)


async def test_silence_is_broken_again_and_again() -> None:
    stream = Stream()
    async with KeepAlive(stream.write, stream.sign, 0.02):
        await stream.until(3)
    assert stream.written[:3] == ["sign 1", "sign 2", "sign 3"]
    assert len(asyncio.all_tasks()) == 1


async def test_no_signs_while_there_is_something_to_say_or_none_are_wanted() -> None:
    for quiet_s in (0.0, 3600.0):
        stream = Stream()
        async with KeepAlive(stream.write, stream.sign, quiet_s) as kept:
            for number in range(100):
                await kept.write(str(number))
                await asyncio.sleep(0)
        assert stream.written == [str(number) for number in range(100)]


async def test_a_message_waits_for_the_sign_before_it() -> None:
    stream = Stream()
    stream.open.clear()
    async with KeepAlive(stream.write, stream.sign, 0.02) as kept:
        while not stream.writing:
            await asyncio.sleep(0.005)
        message = asyncio.create_task(kept.write("message"))
        await asyncio.sleep(0.1)  # several times the silence: nothing is added while the client does not read
        assert stream.signs == 1
        stream.open.set()
        await message
    assert stream.written[:2] == ["sign 1", "message"]


async def test_a_sign_waits_for_the_message_before_it() -> None:
    stream = Stream()
    stream.open.clear()
    async with KeepAlive(stream.write, stream.sign, 0.02) as kept:
        message = asyncio.create_task(kept.write("message"))
        await asyncio.sleep(0.1)
        assert stream.signs == 0
        stream.open.set()
        await message
        await stream.until(2)
    assert stream.written[:2] == ["message", "sign 1"]


async def test_what_a_sign_met_is_told_to_the_next_message() -> None:
    stream = Stream()
    stream.error = OSError("gone")
    async with KeepAlive(stream.write, stream.sign, 0.02) as kept:
        while not stream.signs:
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.1)
        assert stream.signs == 1
        with pytest.raises(OSError, match="gone"):
            await kept.write("message")


async def test_a_sign_on_its_way_is_let_out_before_leaving() -> None:
    """Behind one that is broken off nothing more can be told."""
    stream = Stream()
    stream.open.clear()
    async with KeepAlive(stream.write, stream.sign, 0.02):
        while not stream.writing:
            await asyncio.sleep(0.005)
        asyncio.get_running_loop().call_later(0.05, stream.open.set)
    assert stream.written == ["sign 1"]


async def test_leaving_ends_a_sign_that_nobody_reads() -> None:
    stream = Stream()
    stream.open.clear()
    async with KeepAlive(stream.write, stream.sign, 0.02):
        while not stream.writing:
            await asyncio.sleep(0.005)
    assert stream.writing == 0
    assert stream.written == []


async def test_a_cancelled_message_leaves_nothing() -> None:
    stream = Stream()
    stream.open.clear()
    async with KeepAlive(stream.write, stream.sign, 0.02) as kept:
        while not stream.writing:
            await asyncio.sleep(0.005)
        message = asyncio.create_task(kept.write("message"))
        await asyncio.sleep(0.01)
        message.cancel()
        with pytest.raises(asyncio.CancelledError):
            await message
    assert len(asyncio.all_tasks()) == 1
