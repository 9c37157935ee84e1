"""The queue between workers' sessions and a request."""

import asyncio
import gc
import tracemalloc

import pytest

from twostroke.engine.request import FinishReason, SequenceKey, SequenceOutput, SequenceTimings, Token
from twostroke.services.gateway.inbox import (
    EVENT_BYTES,
    LOGPROB_BYTES,
    TOKEN_BYTES,
    Event,
    Gone,
    Inbox,
    Output,
    size_of,
)
from twostroke.services.gateway.turns import Turns


def output(*ids: int, logprobs: int = 0) -> Output:
    tokens = [Token(id_, ((1, -1.0),) * logprobs) for id_ in ids]
    return Output(1, SequenceOutput(SequenceKey(1, 1, 0, 0), 0, tokens, None, None))


async def taken(inbox: Inbox) -> list[Event]:
    await inbox.arrival()
    return inbox.take()


def never() -> None:
    raise AssertionError("it is not full")


async def test_takes_all_that_came_in_order() -> None:
    inbox, events = Inbox(10_000, never, Turns()), [output(1), Gone(2, "x"), output(2, 3)]
    for event in events:
        inbox.put(event)
    assert await taken(inbox) == events


async def test_a_taker_that_waits_is_woken_once_for_all() -> None:
    inbox = Inbox(10_000, never, Turns())
    got: list[list[Event]] = []

    async def take() -> None:
        got.append(await taken(inbox))

    task = asyncio.create_task(take())
    await asyncio.sleep(0)
    inbox.put(output(1))
    inbox.put(output(2))
    await task
    assert got == [[output(1), output(2)]]


async def test_a_taker_can_be_cancelled_and_nothing_is_lost() -> None:
    inbox = Inbox(10_000, never, Turns())
    task = asyncio.create_task(taken(inbox))
    await asyncio.sleep(0)
    inbox.put(output(1))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await taken(inbox) == [output(1)]


async def test_the_bound_is_told_once_and_nothing_more_is_kept() -> None:
    told: list[int] = []
    inbox = Inbox(2 * (EVENT_BYTES + TOKEN_BYTES), lambda: told.append(1), Turns())
    inbox.put(output(1))
    inbox.put(output(2))
    assert not told
    inbox.put(output(3))
    inbox.put(output(4))
    assert told == [1]


async def test_taking_makes_room() -> None:
    inbox = Inbox(EVENT_BYTES + TOKEN_BYTES, never, Turns())
    for id_ in range(5):
        inbox.put(output(id_))
        assert await taken(inbox) == [output(id_)]


def test_sizes() -> None:
    assert size_of(Gone(1, "x")) == EVENT_BYTES
    assert size_of(output(1, 2, logprobs=3)) == EVENT_BYTES + 2 * TOKEN_BYTES + 6 * LOGPROB_BYTES


async def test_one_that_has_events_waits_for_its_turn_and_takes_what_came_meanwhile() -> None:
    turns = Turns(1)
    first, second = Inbox(10_000, never, turns), Inbox(10_000, never, turns)
    for inbox in (first, second):
        inbox.put(output(1))
    assert await taken(first) == [output(1)]
    asyncio.get_running_loop().call_soon(second.put, output(2))
    assert await taken(second) == [output(1), output(2)]


def later(first: int, *ids: int, finish: FinishReason | None = None, timings: SequenceTimings | None = None) -> Output:
    return Output(1, SequenceOutput(SequenceKey(1, 1, 0, 0), first, [Token(id_) for id_ in ids], finish, timings))


async def test_tokens_that_go_on_where_the_last_event_ended_are_put_behind_its_own() -> None:
    inbox = Inbox(10_000, never, Turns())
    for event in (later(0, 5, timings=SequenceTimings()), later(1, 6), later(2, 7, 8, finish=FinishReason.STOP)):
        inbox.put(event)
    inbox.put(later(4, 9))
    first, second = await taken(inbox)
    assert isinstance(first, Output)
    assert [token.token_id for token in first.output.tokens] == [5, 6, 7, 8]
    assert first.output.finish is FinishReason.STOP
    assert first.output.timings == SequenceTimings()
    assert second == later(4, 9)


@pytest.mark.parametrize(
    "event",
    [
        later(2, 6),  # after a gap
        later(0, 5),  # a copy
        later(1, 6, timings=SequenceTimings(1.0)),
        Output(2, later(1, 6).output),  # of another worker
        Gone(1, "x"),
    ],
)
async def test_events_that_say_more_stay_apart(event: Event) -> None:
    inbox = Inbox(10_000, never, Turns())
    inbox.put(later(0, 5))
    inbox.put(event)
    assert await taken(inbox) == [later(0, 5), event]


async def test_what_is_kept_is_counted_as_the_memory_that_it_takes() -> None:
    """Of an event, of its further tokens, of log-probabilities."""
    for logprobs, per_step, gap in ((0, 1, 1), (0, 50, 0), (20, 1, 0), (5, 4, 1)):
        inbox = Inbox(1 << 30, never, Turns())
        gc.collect()
        tracemalloc.start()
        try:
            before = tracemalloc.get_traced_memory()[0]
            for index in range(300):
                ids = range(1000 + per_step * index, 1000 + per_step * (index + 1))
                told = [Token(i, tuple((i + k, -i - k / 7) for k in range(logprobs))) for i in ids]
                key = SequenceKey(1, 1000 + index, 0, 0)
                inbox.put(Output(1, SequenceOutput(key, (per_step + gap) * index, told, None, None)))
            taken = tracemalloc.get_traced_memory()[0] - before
        finally:
            tracemalloc.stop()
        assert 0.5 < inbox._bytes / taken < 2.0, (logprobs, per_step, gap, inbox._bytes, taken)
