"""How many requests are inside at once: a count, and a refusal at once when it is reached."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from ...errors import Overloaded, Unavailable

RETRY_S = 1.0


class Admission:
    """One loop owns it."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._inside = 0
        self._open = True
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def inside(self) -> int:
        """Answers of requests that are admitted and not yet gone."""
        return self._inside

    @contextmanager
    def slot(self, answers: int = 1) -> Iterator[None]:
        """A place for each answer for the time of the `with` block, but never more than there are in all.

        Overloaded when too few are free, Unavailable after `close`.
        """
        if not self._open:
            raise Unavailable("the gateway is shutting down", retry_after_s=RETRY_S)
        places = min(answers, self._limit)
        if self._inside + max(1, places) > self._limit:
            raise Overloaded(f"{self._inside} requests are being served already", retry_after_s=RETRY_S)
        self._inside += places
        self._idle.clear()
        try:
            yield
        finally:
            self._inside -= places
            if self._inside == 0:
                self._idle.set()

    def close(self) -> None:
        """Admits nothing from now on."""
        self._open = False

    async def idle(self) -> None:
        """Returns when nobody is inside."""
        await self._idle.wait()
