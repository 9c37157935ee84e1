"""Notices a thread that hangs."""

import asyncio
from collections.abc import Callable

BEAT_S = 1.0
STALL_BEATS = 120  # longer than a step takes on any machine of use


async def stalled(turns: Callable[[], int], *, beats: int = STALL_BEATS, beat_s: float = BEAT_S) -> None:
    """Returns once `turns`, which counts a thread's rounds, stood still for so many beats.

    Counted in beats, not seconds: while this whole process is stopped, nobody hangs.
    """
    last, still = turns(), 0
    while still < beats:
        await asyncio.sleep(beat_s)
        now = turns()
        still = still + 1 if now == last else 0
        last = now
