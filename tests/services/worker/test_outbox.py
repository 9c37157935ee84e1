"""The bounded buffer in front of a stream."""

import asyncio

import pytest

from twostroke.services.worker.outbox import Outbox


class Blob:
    def __init__(self, size: int, name: int = 0) -> None:
        self.size, self.name = size, name

    def ByteSize(self) -> int:  # noqa: N802
        return self.size


async def taken(box: Outbox[Blob]) -> list[int]:
    """Takes and writes until the box is closed."""
    names = []
    while (item := await box.take()) is not None:
        names.append(item[0].name)
        box.written(item[1])
    return names


async def test_first_in_first_out_while_both_sides_run() -> None:
    box = Outbox[Blob](10)
    reader = asyncio.create_task(taken(box))
    for name in range(100):
        while not box.put(Blob(3, name)):
            await asyncio.sleep(0)
    box.close(flush=True)
    assert await reader == list(range(100))
    assert box.empty


async def test_the_bound_counts_what_is_being_written() -> None:
    box = Outbox[Blob](10)
    assert box.put(Blob(6))
    item = await box.take()
    assert item is not None
    assert not box.empty
    assert box.put(Blob(4))
    assert not box.put(Blob(1))
    box.written(item[1])
    assert box.put(Blob(6))
    assert not box.put(Blob(0))  # even an empty message costs something


async def test_one_larger_message_passes_when_nothing_waits() -> None:
    box = Outbox[Blob](10)
    assert box.put(Blob(1000))
    assert not box.put(Blob(1))


@pytest.mark.parametrize("flush", [False, True])
async def test_close(flush: bool) -> None:
    box = Outbox[Blob](10)
    for name in range(3):
        assert box.put(Blob(1, name))
    item = await box.take()
    assert item is not None
    box.close(flush=flush)
    assert not box.put(Blob(1))
    box.written(item[1])
    assert await taken(box) == ([1, 2] if flush else [])
    assert box.empty


async def test_close_wakes_a_reader() -> None:
    box = Outbox[Blob](10)
    reader = asyncio.create_task(taken(box))
    await asyncio.sleep(0)
    box.close()
    assert await reader == []
    assert await box.take() is None
