"""What workers say of one request, until the coroutine that the request lives in takes it."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from ...engine.request import SequenceOutput
from ...v1 import worker_pb2
from .turns import Turns

EVENT_BYTES = 32  # of an event, without its tokens
TOKEN_BYTES = 8
LOGPROB_BYTES = 8


@dataclass(frozen=True, slots=True)
class Output:
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
    """Bytes that an event counts for, about as many as on the wire."""
    if not isinstance(event, Output):
        return EVENT_BYTES
    tokens = event.output.tokens
    logprobs = sum(len(token.logprobs) for token in tokens)
    return EVENT_BYTES + TOKEN_BYTES * len(tokens) + LOGPROB_BYTES * logprobs


class Inbox:
    """A queue bounded in bytes; many put, one takes, all on one loop.

    Putting never waits, as no request may hold up a worker's session: at the bound `on_full` is called, once, and
    nothing more is kept.
    """

    def __init__(self, limit_bytes: int, on_full: Callable[[], None], turns: Turns) -> None:
        """`turns`: in which what has come is taken."""
        self._limit = limit_bytes
        self._on_full = on_full
        self._turns = turns
        self._events: list[Event] = []
        self._bytes = 0
        self._full = False
        self._waiter: asyncio.Future[None] | None = None  # of a taker that waits for events, not for its turn

    def put(self, event: Event) -> None:
        """Adds an event; the taker's turn will come."""
        if self._full:
            return
        self._bytes += size_of(event)
        if self._bytes > self._limit:
            self._full = True
            self._events.clear()
            self._on_full()
            return
        self._events.append(event)
        if self._waiter is not None:
            waiter, self._waiter = self._waiter, None
            self._turns.queue(waiter)

    async def take(self) -> list[Event]:
        """All that has come, in order; waits for at least one, and for its turn."""
        if not (self._events and self._turns.now()):
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            if self._events:
                self._turns.queue(waiter)
            else:
                self._waiter = waiter
            try:
                await waiter
            finally:
                self._waiter = None
        events, self._events, self._bytes = self._events, [], 0
        return events
