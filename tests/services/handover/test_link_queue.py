"""The queue of a link: order, heartbeats, bounds, ends."""

import asyncio
import gc
from typing import Any

import pytest

from twostroke.errors import Mismatch, Unavailable
from twostroke.services.handover.link_queue import LinkQueue


class Wire:
    """Takes what is pumped; `stuck` blocks writers."""

    def __init__(self) -> None:
        self.sent: list[str] = []
        self.stuck = False
        self.arrived = asyncio.Event()

    async def write(self, message: str) -> None:
        if self.stuck:
            await asyncio.Event().wait()
        self.sent.append(message)
        self.arrived.set()

    async def until(self, count: int) -> None:
        while len(self.sent) < count:
            self.arrived.clear()
            await self.arrived.wait()


def pump(queue: LinkQueue[int], wire: Wire) -> Any:
    return queue.pump(wire.write, lambda number: f"m{number}", lambda sequence: f"h{sequence}")


async def forever() -> None:
    await asyncio.Event().wait()


async def test_a_heartbeat_comes_first_and_messages_keep_their_order() -> None:
    queue, wire = LinkQueue[int](heartbeat_s=60), Wire()
    queue.put([1, 2])
    task = asyncio.create_task(queue.run(forever(), pump(queue, wire)))
    await wire.until(3)
    queue.put([3])
    queue.put([4, 5])
    await wire.until(6)
    queue.end()
    await task
    assert wire.sent == ["h1", "m1", "m2", "m3", "m4", "m5"]


async def test_heartbeats_come_among_messages_too() -> None:
    queue, wire = LinkQueue[int](heartbeat_s=0.02), Wire()
    task = asyncio.create_task(queue.run(forever(), pump(queue, wire)))
    for number in range(30):
        queue.put([number])
        await asyncio.sleep(0.005)
    queue.end()
    await task
    beats = [message for message in wire.sent if message[0] == "h"]
    assert beats == [f"h{i + 1}" for i in range(len(beats))]
    assert len(beats) >= 3
    assert [message for message in wire.sent if message[0] == "m"] == [f"m{i}" for i in range(30)]


async def test_a_peer_that_takes_nothing_loses_the_stream() -> None:
    queue, wire = LinkQueue[int](limit=10, heartbeat_s=60), Wire()
    wire.stuck = True
    task = asyncio.create_task(queue.run(forever(), pump(queue, wire)))
    await asyncio.sleep(0)
    queue.put(range(10))
    assert not queue.overflowed
    queue.put([11])
    with pytest.raises(Unavailable, match="more than 10"):
        await task
    queue.put([12])  # ignored


async def test_what_either_direction_raises_ends_both() -> None:
    async def fails() -> None:
        raise Mismatch("no")

    queue, wire = LinkQueue[int](heartbeat_s=60), Wire()
    with pytest.raises(Mismatch):
        await queue.run(fails(), pump(queue, wire))
    assert queue.ended.done()

    queue = LinkQueue[int](heartbeat_s=60)
    with pytest.raises(Mismatch):
        await queue.run(forever(), fails())


async def test_the_end_of_what_is_received_ends_all() -> None:
    async def nothing() -> None:
        return

    queue, wire = LinkQueue[int](heartbeat_s=60), Wire()
    await queue.run(nothing(), pump(queue, wire))
    assert queue.ended.done()


async def test_a_cancelled_stream_leaves_no_task() -> None:
    queue, wire = LinkQueue[int](heartbeat_s=60), Wire()
    task = asyncio.create_task(queue.run(forever(), pump(queue, wire)))
    await wire.until(1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    gc.collect()
    assert asyncio.all_tasks() == {asyncio.current_task()}
