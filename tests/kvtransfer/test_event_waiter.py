"""One thread waits for events in order; what follows an event may fail, and an event may."""

import threading

import pytest

from twostroke.kvtransfer.event_waiter import EventWaiter


class Event:
    """Happens when the test says so."""

    def __init__(self, error: Exception | None = None) -> None:
        self.happened = threading.Event()
        self.error = error

    def synchronize(self) -> None:
        self.happened.wait()
        if self.error is not None:
            raise self.error


def test_events_are_seen_in_the_order_of_adding() -> None:
    waiter, seen = EventWaiter("test"), []
    events = [Event() for _ in range(5)]
    for number, event in enumerate(events):
        waiter.add(event, lambda error, number=number: seen.append((number, error, threading.current_thread().name)))
    for event in reversed(events):
        event.happened.set()
    waiter.close()
    assert seen == [(number, None, "test") for number in range(5)]


def test_an_error_is_told_and_the_next_event_is_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    waiter, seen = EventWaiter("test"), []
    bad, good = Event(RuntimeError("device lost")), Event()

    def fails(error: Exception | None) -> None:
        seen.append(str(error))
        raise ValueError("no")

    waiter.add(bad, fails)
    waiter.add(good, lambda error: seen.append(error))
    bad.happened.set()
    good.happened.set()
    waiter.close()
    waiter.close()
    assert seen == ["device lost", None]
    assert "what followed an event failed" in caplog.text


def test_it_begins_as_told_and_goes_on_when_that_fails() -> None:
    def begin() -> None:
        seen.append(threading.current_thread().name)
        raise OSError("no device")

    seen: list[object] = []
    waiter = EventWaiter("chosen", begin)
    event = Event()
    event.happened.set()
    waiter.add(event, seen.append)
    waiter.close()
    assert seen == ["chosen", None]
