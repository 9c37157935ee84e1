"""What workers say of one request, until the coroutine that the request lives in takes it."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from ...engine.request import SequenceOutput, Token
from ...v1 import worker_pb2
from .turns import Turns

EVENT_BYTES = 480  # of memory that an event takes, without its tokens
TOKEN_BYTES = 110
LOGPROB_BYTES = 130


class Output(NamedTuple):
    """New tokens from the worker of this incarnation."""

    worker: int
    output: SequenceOutput


@dataclass(frozen=True, slots=True)
class Failed:
    """The worker gave the sequence up."""

    worker: int
    code: worker_pb2.FailureCode.ValueType
    message: str
    field: str = ""  # that is wrong, as the worker calls it


@dataclass(frozen=True, slots=True)
class Gone:
    """The session with the worker ended; nothing more comes from it."""

    worker: int
    reason: str


Event: TypeAlias = Output | Failed | Gone


def size_of(event: Event) -> int:
    """Bytes that an event keeps, by and large."""
    return EVENT_BYTES + (tokens_size(event.output.tokens) if isinstance(event, Output) else 0)


def tokens_size(tokens: Sequence[Token]) -> int:
    """The same of its tokens."""
    size = TOKEN_BYTES * len(tokens)
    if tokens and tokens[0].logprobs:  # all of a sequence's have them, or none
        size += LOGPROB_BYTES * sum(len(token.logprobs) for token in tokens)
    return size


def joined(before: Event, event: Event) -> int | None:
    """Puts tokens behind those of the event before, where they go on there and nothing else is told of them; bytes that
    it keeps for them. None: they stay apart."""
    if not (isinstance(before, Output) and isinstance(event, Output)) or before.worker != event.worker:
        return None
    first, more = before.output, event.output
    if first.finish is not None or more.timings is not None:
        return None
    if first.prompt_logprobs is not None or more.prompt_logprobs is not None:
        return None
    if more.first_index != first.first_index + len(first.tokens):
        return None
    first.tokens += more.tokens
    first.finish = more.finish
    return tokens_size(more.tokens)


class Inbox:
    """A queue bounded in bytes; many put, one waits for an arrival and takes, all on one loop.

    Putting never waits, as no request may hold up a worker's session: at the bound `on_full` is called, once, and
    nothing more is kept.
    """

    def __init__(self, limit_bytes: int, on_full: Callable[[], None], turns: Turns) -> None:
        """`turns`: in which what has come is taken."""
        self._limit = limit_bytes
        self._on_full = on_full
        self._turns = turns
        self._loop = asyncio.get_running_loop()
        self._events: list[Event] = []
        self._bytes = 0
        self._full = False
        self._waiter: asyncio.Future[None] | None = None  # of a taker that waits for events, not for its turn

    def put(self, event: Event) -> None:
        """Adds an event; the taker's turn will come."""
        if self._full:
            return
        added = joined(self._events[-1], event) if self._events else None
        if added is None:
            added = size_of(event)
            self._events.append(event)
        self._bytes += added
        if self._bytes > self._limit:
            self._full = True
            self._events.clear()
            self._on_full()
            return
        if self._waiter is not None:
            waiter, self._waiter = self._waiter, None
            self._turns.queue(waiter)

    def arrival(self) -> asyncio.Future[None]:
        """Is done once something is there and it is the taker's turn. A plain future, and one wait at a time: there is
        one for each token, which would pass through every coroutine."""
        turn: asyncio.Future[None] = self._loop.create_future()
        if not self._events:
            self._waiter = turn
        elif self._turns.now():
            turn.set_result(None)
        else:
            self._turns.queue(turn)
        return turn

    def take(self) -> list[Event]:
        """All that has come, in order."""
        events, self._events, self._bytes = self._events, [], 0
        return events
