"""The engine's thread between the launch of a step and its end: it waits for that and for news, whichever comes."""

import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from ...engine.batch import Launched
from ...kvtransfer.event_waiter import EventWaiter
from .handover import NEAR_S

_LOOK_S = 20e-6


class NewsWait:
    """An `engine.batch.StepWait`. A prompt's step takes a GPU up to seconds: tickets, and copies that are done, are
    handled meanwhile. Where steps are computed at once it does nothing.
    """

    def __init__(self, handle: Callable[[], None], device: torch.device) -> None:
        """`handle`: deals with all news; on the engine's thread, within a step."""
        self._handle = handle
        self._device = device
        self._wake = threading.Event()
        self._awake_until = 0.0
        self._waiter: EventWaiter | None = None

    def tell(self) -> None:
        """There are news. Any thread."""
        self._wake.set()

    def stay_awake(self) -> None:
        """The step will end soon. On the engine's thread."""
        self._awake_until = time.monotonic() + NEAR_S

    def __call__(self, step: Launched) -> None:
        """Returns once the step is computed, or the device failed: its tokens can be asked for."""
        event = getattr(step, "event", None)
        if event is not None:
            try:
                self._wait(event)
            finally:
                self._awake_until = 0.0

    def _wait(self, event: Any) -> None:
        self._wake.clear()
        self._handle()
        if _happened(event):
            return
        if self._waiter is None:
            self._waiter = EventWaiter("step-wait", self._begin)
        ended = threading.Event()

        def seen(error: Exception | None) -> None:  # what went wrong, the step's tokens will tell
            ended.set()
            self._wake.set()

        self._waiter.add(event, seen)
        while not ended.is_set():
            awake = time.monotonic() < self._awake_until
            if self._wake.wait(_LOOK_S if awake else None):
                self._wake.clear()
                self._handle()
            if awake and _happened(event):
                self._handle()  # copies that were seen to be done meanwhile
                break

    def close(self) -> None:
        """Ends its thread."""
        if self._waiter is not None:
            self._waiter.close()

    def _begin(self) -> None:
        if self._device.type == "cuda":  # or the thread would make itself a context on the first one
            torch.cuda.set_device(self._device)


def _happened(event: Any) -> bool:
    """Or it never will, for the device failed: what went wrong, the step's tokens will tell."""
    try:
        return bool(event.query())
    except Exception:
        return True
