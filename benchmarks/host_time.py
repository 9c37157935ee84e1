"""How long the host works on a step, and how long it waits for the GPU in it."""

import contextlib
import time
from collections.abc import Iterator
from types import TracebackType
from typing import Any

from twostroke.engine.build import Engine


class _Timed:
    """A launched step whose waiting is noted."""

    def __init__(self, step: Any, clock: "HostTime") -> None:
        self._step, self._clock = step, clock

    def tokens(self) -> Any:
        """Of the step; what it says that it waited, or the whole call."""
        start = time.perf_counter()
        try:
            return self._step.tokens()
        finally:
            whole = time.perf_counter() - start
            self._clock.note(float(getattr(self._step, "waited_s", whole)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._step, name)


class HostTime:
    """While entered, notes each `with step():` as seconds `waited` for launched work and seconds `busy` otherwise."""

    def __init__(self, engine: Engine) -> None:
        """`engine`: its runner's `launch` is wrapped."""
        self.waited: list[float] = []
        self.busy: list[float] = []
        self._runner: Any = engine.runner
        self._now = 0.0

    def note(self, seconds: float) -> None:
        """The host waited."""
        self._now += seconds

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Around one step."""
        self._now, start = 0.0, time.perf_counter()
        yield
        self.waited.append(self._now)
        self.busy.append(time.perf_counter() - start - self._now)

    def __enter__(self) -> "HostTime":
        if launch := getattr(self._runner, "launch", None):
            self._runner.launch = lambda *args, **kwargs: _Timed(launch(*args, **kwargs), self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with contextlib.suppress(AttributeError):
            del self._runner.launch
