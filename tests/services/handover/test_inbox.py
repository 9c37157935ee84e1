"""What other threads tell: handled in order, within a step only what may be, and nothing is lost."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from twostroke.services.handover.inbox import Inbox, _Event, always, never
from twostroke.services.handover.step_wait import NewsWait

from ..late_device import Event, LateStep

CPU = torch.device("cpu")


def inbox_of(*, ordered: bool, then: Callable[[], None] = lambda: None) -> Inbox:
    inbox = Inbox(CPU, ordered=ordered, then=then)
    inbox.attach(lambda event: None)
    return inbox


@pytest.mark.parametrize("ordered", [False, True])
def test_between_steps_all_is_handled_in_order(ordered: bool) -> None:
    inbox, seen = inbox_of(ordered=ordered), list[int]()
    for number in range(4):
        inbox.tell(lambda number=number: seen.append(number), always if number % 2 else never)  # type: ignore[misc]
    inbox.drain()
    assert (seen, len(inbox)) == ([0, 1, 2, 3], 0)


@pytest.mark.parametrize(("ordered", "within"), [(False, [0, 2]), (True, [0])])
def test_within_a_step_some_waits_for_its_end(ordered: bool, within: list[int]) -> None:
    inbox, seen = inbox_of(ordered=ordered), list[int]()
    for number, kind in enumerate((always, never, always, never)):
        inbox.tell(lambda number=number: seen.append(number), kind)  # type: ignore[misc]
    inbox.within_step()
    inbox.within_step()
    assert seen == within
    inbox.step_ended()
    assert seen == within  # a step's own news come first
    inbox.drain()
    assert sorted(seen) == [0, 1, 2, 3]
    assert [n for n in seen if n not in within] == [n for n in range(4) if n not in within]


def test_the_engine_is_touched_at_a_steps_end() -> None:
    inbox, seen = inbox_of(ordered=False), list[str]()
    inbox.engine(lambda: seen.append("between"))
    inbox.tell(lambda: inbox.engine(lambda: seen.append("held up")), always)
    inbox.within_step()
    assert seen == ["between"]
    inbox.step_ended()
    inbox.step_ended()
    assert seen == ["between", "held up"]
    inbox.engine(lambda: seen.append("again"))
    assert seen[-1] == "again"


def test_an_event_that_fails_within_a_step_costs_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    inbox, seen = inbox_of(ordered=False), list[int]()

    def fails() -> None:
        raise RuntimeError("no")

    inbox.tell(lambda: seen.append(0), never)
    inbox.tell(fails, always)
    inbox.tell(lambda: seen.append(1), always)
    inbox.within_step()
    assert "failed within a step" in caplog.text
    inbox.within_step()
    assert seen == [1]
    inbox.step_ended()
    inbox.drain()
    assert seen == [1, 0]


def test_what_follows_a_step_that_is_waited_for() -> None:
    """News are handled while the step is computed; the wait ends with the step."""
    handled, step = list[str](), LateStep(0, [])
    inbox = inbox_of(ordered=False, then=lambda: handled.append("then"))

    def second() -> None:
        handled.append("second")
        step.event.record()

    def first() -> None:
        handled.append("first")
        threading.Thread(target=lambda: inbox.tell(second, always)).start()

    inbox.tell(first, always)
    inbox.wait(step)
    assert [word for word in handled if word != "then"] == ["first", "second"]
    assert inbox.in_step
    inbox.close()


def test_a_step_that_is_computed_already_is_not_waited_for() -> None:
    handled = list[int]()
    wait = NewsWait(lambda: handled.append(1), CPU)
    done = LateStep(0, [])
    done.event.record()
    wait(done)
    assert handled == [1]
    wait(object())  # type: ignore[arg-type]  # of a runner that computes at once
    assert handled == [1]
    assert wait._waiter is None
    wait.close()


def test_a_wait_that_is_nearly_over_looks_itself() -> None:
    """The other thread's word is not needed; what came last is handled before the wait ends."""
    over, handled, step = threading.Event(), list[str](), LateStep(0, [])
    inbox = inbox_of(ordered=False)

    class Unseen(Event):
        """Happens when it is asked for the third time, and something else with it."""

        asked = 0

        def query(self) -> bool:
            self.asked += 1
            if self.asked == 3:
                inbox._events.append(_Event(lambda: handled.append("last"), always))  # its word is still on its way
            return self.asked > 2

        def synchronize(self) -> None:
            over.wait(10)

    def copied() -> None:
        handled.append("copied")
        inbox.stay_awake()

    step.event = Unseen()
    inbox.tell(copied, always)
    inbox.wait(step)
    assert handled == ["copied", "last"]
    assert not over.is_set()
    over.set()
    inbox.close()


def test_a_wait_that_is_over_at_once_leaves_nobody_awake() -> None:
    inbox, step = inbox_of(ordered=False), LateStep(0, [])
    step.event.record()
    inbox.tell(inbox.stay_awake, always)
    inbox.wait(step)
    assert inbox._news._awake_until == 0.0


@pytest.mark.parametrize("notices", ["query", "synchronize"])
def test_a_device_that_fails_ends_the_wait(notices: str) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("lost")

    step = LateStep(0, [])
    step.event = type("Broken", (Event,), {notices: fails})()
    wait = NewsWait(lambda: None, CPU)
    wait(step)
    wait.close()
