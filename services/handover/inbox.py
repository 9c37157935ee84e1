"""What other threads tell a hand-over, and when the engine's thread may deal with it."""

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch

from ...engine.batch import StepWait
from .handover import Post
from .step_wait import NewsWait

log = logging.getLogger(__name__)

Action: TypeAlias = Callable[[], None]


def always() -> bool:
    """An event that may be handled within a step."""
    return True


def never() -> bool:
    """An event that waits for the step's end."""
    return False


@dataclass(slots=True)
class _Event:
    handle: Action
    within: Callable[[], bool]


class Inbox:
    """Events for the engine's thread: handled between steps, and within one where that is allowed.

    Within a step the engine must not be touched: what concerns it goes through `engine`, which puts it off to the
    step's end. A step is in progress from the first `within_step` until `step_ended`.
    """

    def __init__(self, device: torch.device, *, ordered: bool, then: Action = lambda: None) -> None:
        """`device`: of the engine. `ordered`: an event that must wait holds up all that came after it. `then`: called
        after the events of each `within_step`.
        """
        self.in_step = False
        self._ordered = ordered
        self._then = then
        self._post: Post
        self._events: deque[_Event] = deque()  # filled by any thread, emptied by the engine's
        self._after_step: list[Action] = []
        self._news = NewsWait(self.within_step, device)
        self.wait: StepWait = self._news
        self.stay_awake = self._news.stay_awake

    def __len__(self) -> int:
        return len(self._events)

    def attach(self, post: Post) -> None:
        """See `Handover.attach`."""
        self._post = post

    def tell(self, handle: Action, within: Callable[[], bool] = never) -> None:
        """Any thread. `within`: asked within a step whether this may be handled there."""
        self._events.append(_Event(handle, within))
        self._post(self.drain)
        self._news.tell()

    def drain(self) -> None:
        """Handles what may be handled now; the engine's thread, as all below."""
        later: list[_Event] = []
        try:
            while self._events and not (later and self._ordered):
                event = self._events.popleft()
                if self.in_step and not event.within():
                    later.append(event)
                else:
                    event.handle()
        finally:
            self._events.extendleft(reversed(later))

    def within_step(self) -> None:
        """Handles what may be handled within a step. Does not raise: the step is not to blame."""
        self.in_step = True
        try:
            self.drain()
            self._then()
        except Exception:
            log.exception("an event of a link failed within a step")

    def engine(self, action: Action) -> None:
        """Runs what touches the engine: now, or at the step's end."""
        if self.in_step:
            self._after_step.append(action)
        else:
            action()

    def step_ended(self) -> None:
        """Runs what was put off."""
        self.in_step = False
        after_step, self._after_step = self._after_step, []
        for action in after_step:
            action()

    def close(self) -> None:
        """Ends its thread, once the engine's has ended."""
        self._news.close()
