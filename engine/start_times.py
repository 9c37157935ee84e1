"""Where the time until an engine serves goes."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class StartTimes:
    """Seconds by part, in the order in which the parts were first entered. One thread at a time."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock`: seconds."""
        self._clock = clock
        self._parts: dict[str, float] = {}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """What runs inside counts for `name`, also where it raises; a part may be entered again. Not nested."""
        began = self._clock()
        try:
            yield
        finally:
            self._parts[name] = self._parts.get(name, 0.0) + self._clock() - began

    @property
    def total(self) -> float:
        """All parts."""
        return sum(self._parts.values())

    def to_dict(self) -> dict[str, float]:
        """For JSON: seconds by part."""
        return {name: round(seconds, 4) for name, seconds in self._parts.items()}

    def __str__(self) -> str:
        """'12.3 s: weights 5.1, warm-up 7.2'."""
        parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in self._parts.items())
        return f"{self.total:.1f} s: {parts}" if parts else "0.0 s"
