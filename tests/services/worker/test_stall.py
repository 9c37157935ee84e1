"""A thread that stands still is noticed; one that is slow is not."""

import asyncio
import itertools

from twostroke.services.worker.stall import stalled


async def test_only_beats_in_a_row_count() -> None:
    rounds = iter([1, 1, 1, 2, 2, 2, 3, *[3] * 3])
    asked = 0

    def turns() -> int:
        nonlocal asked
        asked += 1
        return next(rounds)

    await asyncio.wait_for(stalled(turns, beats=3, beat_s=0), 10)
    assert asked == 10


async def test_what_moves_is_watched_for_ever() -> None:
    counter = itertools.count()
    watch = asyncio.create_task(stalled(lambda: next(counter), beats=1, beat_s=0))
    for _ in range(100):
        await asyncio.sleep(0)
    assert not watch.done()
    watch.cancel()
