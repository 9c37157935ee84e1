"""How many requests are inside at once: a count, and a refusal at once when it is reached."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from ..errors import Overloaded, Unavailable

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
        """Requests admitted and not yet gone."""
        return self._inside

    @contextmanager
    def slot(self) -> Iterator[None]:
        """A place for the time of the `with` block. Overloaded when all are taken, Unavailable after `close`."""
        if not self._open:
            raise Unavailable("the gateway is shutting down", retry_after_s=RETRY_S)
        if self._inside >= self._limit:
            raise Overloaded(f"{self._limit} requests are being served already", retry_after_s=RETRY_S)
        self._inside += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._inside -= 1
            if self._inside == 0:
                self._idle.set()

    def close(self) -> None:
        """Admits nothing from now on."""
        self._open = False

    async def idle(self) -> None:
        """Returns when nobody is inside."""
        await self._idle.wait()
