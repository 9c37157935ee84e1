"""The outlet: one message ahead, nothing lost, nothing left behind, whatever the transport does."""

import asyncio

import pytest

from twostroke.errors import Overloaded
from twostroke.services.gateway.vllm_engine.outlet import Outlet


class Transport:
    """Takes messages while it is open."""

    def __init__(self) -> None:
        self.taken: list[int] = []
        self.open = asyncio.Event()
        self.open.set()
        self.fails: BaseException | None = None

    async def write(self, message: int) -> None:
        await self.open.wait()
        if self.fails is not None:
            raise self.fails
        self.taken.append(message)


async def test_in_order_and_all_of_it() -> None:
    transport = Transport()
    async with Outlet(transport.write) as out:
        assert not out.begun
        for start in range(0, 30, 3):
            await out.put(range(start, start + 3))
            await out.put([])
        await out.end([], 1)
        assert out.begun
    assert transport.taken == list(range(30))


async def test_one_put_may_wait_and_the_next_one_waits_for_it() -> None:
    transport = Transport()
    async with Outlet(transport.write) as out:
        transport.open.clear()
        await out.put([1])
        await asyncio.sleep(0)  # it is being written
        await out.put([2])
        third = asyncio.create_task(out.put([3]))
        done, _ = await asyncio.wait([third], timeout=0.02)
        assert not done
        with pytest.raises(Overloaded):
            await out.end([4], 0.02)
        third.cancel()
        transport.open.set()
        await out.end([], 1)
    assert transport.taken == [1, 2]


@pytest.mark.parametrize("fails", [RuntimeError("broken"), asyncio.CancelledError("the call is over")])
async def test_what_writing_raises_is_raised_where_something_is_put(fails: BaseException) -> None:
    transport = Transport()
    async with Outlet(transport.write) as out:
        transport.fails = fails
        await out.put([1])
        with pytest.raises(type(fails)):
            await out.end([], 1)
        with pytest.raises(type(fails)):
            await out.put([2])
    assert transport.taken == []


async def test_leaving_drops_what_is_not_written() -> None:
    transport = Transport()
    before = asyncio.all_tasks()
    async with Outlet(transport.write) as out:
        transport.open.clear()
        await out.put([1, 2])
    assert transport.taken == []
    assert asyncio.all_tasks() == before
