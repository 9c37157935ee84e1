"""A worker that tells when each station of a hand-over was reached, by the clock that the processes of a host share.

`TWOSTROKE_TIMES=FILE python benchmarks/timed_worker.py prefill ...`: as `twostroke prefill ...`; appends JSON lines
`{"request", "station", "at"}` (seconds) to FILE, twice a second. The stations in order: `STATIONS`.
"""

import functools
import json
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from twostroke.engine.core import EngineCore
from twostroke.kvtransfer.event_waiter import EventWaiter
from twostroke.kvtransfer.messages import Complete
from twostroke.kvtransfer.pushes import Pushes
from twostroke.services.cli import main
from twostroke.services.handover import lane
from twostroke.services.handover.decode import DecodeHandover
from twostroke.services.handover.prefill import PrefillHandover
from twostroke.services.handover.step_wait import NewsWait
from twostroke.services.worker.driver import Driver

STATIONS = (
    "computed",  # the prefill worker's host sees the prompt computed: the first thread of two that look
    "taken in",  # its engine's thread has the tokens
    "complete",  # `Complete` is made up: the last copy was seen to be done
    "written",  # and goes on its way
    "received",  # a thread of the decode worker has it
    "read",  # its engine's thread has it
    "arrived",  # the KV is verified and the sequence joins the batch
    "launch",  # its first decode step is about to be launched
    "launched",
)


class Times:
    """What was seen, until it is written."""

    def __init__(self, path: Path) -> None:
        """`path`: lines are appended there."""
        self._path = path
        self._seen: deque[tuple[str, str, float]] = deque()

    def note(self, request: object, station: str, at: float | None = None) -> None:
        """Any thread."""
        self._seen.append((str(request), station, time.monotonic() if at is None else at))

    def write(self) -> None:
        """All that was noted."""
        lines = []
        while self._seen:
            request, station, at = self._seen.popleft()
            lines.append(json.dumps({"request": request, "station": station, "at": at}) + "\n")
        if lines:
            with self._path.open("ab", buffering=0) as file:  # whole: another process appends to it too
                file.write("".join(lines).encode())


def around(owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
    """Puts `wrapper(original, *arguments)` in the place of `owner.name`."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapped(*arguments: Any, **named: Any) -> Any:
        return wrapper(original, *arguments, **named)

    setattr(owner, name, wrapped)


def patch(times: Times) -> None:
    """Each station."""
    keys: dict[int, str] = {}  # by ticket: one prefill worker and one decode worker
    awaited: set[str] = set()
    ended: dict[int, float] = {}  # when a step was seen computed, by its event
    current = [0]  # the event that the engine's thread waited for last

    def add(original: Any, self: Any, event: Any, seen: Any) -> None:
        def told(error: Exception | None) -> None:
            if threading.current_thread().name == "step-wait":
                ended.setdefault(id(event), time.monotonic())
            seen(error)

        original(self, event, told)

    def step_wait(original: Any, self: Any, step: Any) -> None:
        original(self, step)
        current[0] = id(getattr(step, "event", None))
        ended.setdefault(current[0], time.monotonic())

    def stepped(original: Any, self: Any, result: Any) -> Any:
        for key in result.prefilled:
            times.note(key, "computed", ended.get(current[0]))
            times.note(key, "taken in")
        ended.clear()
        return original(self, result)

    def say_complete(original: Any, self: Any, push: Any) -> Any:
        keys[push.ticket.ticket] = str(push.ticket.key)
        times.note(push.ticket.key, "complete")
        return original(self, push)

    def encode(original: Any, message: Any) -> Any:
        if isinstance(message, Complete):
            times.note(keys[message.ticket], "written")
        return original(message)

    def opened(original: Any, self: Any, reservation: Any) -> None:
        original(self, reservation)
        keys[self.reader._peers[reservation.writer].last_ticket] = str(reservation.key)
        awaited.add(str(reservation.key))

    def comes(station: str, original: Any, self: Any, writer: int, message: Any) -> None:
        if isinstance(message, Complete):
            times.note(keys[message.ticket], station)
        original(self, writer, message)

    def arrived(original: Any, self: Any, message: Any) -> None:
        original(self, message)
        times.note(message.key, "arrived")

    def launch(original: Any, self: Any, plan: Any, hook: Any) -> Any:
        begun = time.monotonic()
        flight = original(self, plan, hook)
        for key in {str(sequence.key) for sequence in plan.sequences} & awaited:
            awaited.discard(key)
            times.note(key, "launch", begun)
            times.note(key, "launched")
        return flight

    def tick(original: Any, self: Any, now: float) -> None:
        original(self, now)
        times.write()

    around(EventWaiter, "add", add)
    around(NewsWait, "__call__", step_wait)
    around(PrefillHandover, "stepped", stepped)
    around(Pushes, "say_complete", say_complete)
    around(lane, "from_writer", encode)
    around(DecodeHandover, "_open", opened)
    around(DecodeHandover, "received", functools.partial(comes, "received"))
    around(DecodeHandover, "_on_message", functools.partial(comes, "read"))
    around(DecodeHandover, "_arrived", arrived)
    around(EngineCore, "_launch", launch)
    around(Driver, "_tick", tick)


if __name__ == "__main__":
    patch(Times(Path(os.environ["TWOSTROKE_TIMES"])))
    main()
