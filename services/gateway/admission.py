"""How many requests are inside at once: a count, and a refusal at once when it is reached."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from ...errors import Overloaded, Unavailable
from ..security.tenant import ANYONE, Tenant
from .ledger import Ledger, LocalLedger

RETRY_S = 1.0


class Admission:
    """One loop owns it."""

    def __init__(self, limit: int, ledger: Ledger | None = None) -> None:
        """`ledger`: what tenants have taken; None: one of this process alone."""
        self._limit = limit
        self._inside = 0
        self.ledger = LocalLedger() if ledger is None else ledger
        self._open = True
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def inside(self) -> int:
        """Answers of requests that are admitted and not yet gone."""
        return self._inside

    @property
    def is_open(self) -> bool:
        """Whether anything is admitted at all."""
        return self._open

    @contextmanager
    def slot(self, answers: int = 1, tenant: Tenant = ANYONE) -> Iterator[None]:
        """A place for each answer for the time of the `with` block, but never more than there are in all, or for its
        tenant.

        Overloaded when too few are free, Unavailable after `close`.
        """
        if not self._open:
            raise Unavailable("the gateway is shutting down", retry_after_s=RETRY_S)
        places = min(answers, self._limit)
        if self._inside + max(1, places) > self._limit:
            raise Overloaded(f"{self._inside} requests are being served already", retry_after_s=RETRY_S)
        with self._of_tenant(max(1, places), tenant):
            self._inside += places
            self._idle.clear()
            try:
                yield
            finally:
                self._leave(places)

    def _leave(self, places: int) -> None:
        self._inside -= places
        if self._inside == 0:
            self._idle.set()

    @contextmanager
    def _of_tenant(self, places: int, tenant: Tenant) -> Iterator[None]:
        """Its own limit: one tenant must not fill the gateway for the others."""
        places = min(places, tenant.limits.max_requests or places)
        refusal = self.ledger.acquire(tenant, places)
        if refusal is not None:
            raise Overloaded(
                f"{refusal.inside} requests of tenant {tenant.name!r} are being served already, of {refusal.limit} "
                "that it may have at once",
                retry_after_s=RETRY_S,
            )
        try:
            yield
        finally:
            self.ledger.release(tenant, places)

    def close(self) -> None:
        """Admits nothing from now on."""
        self._open = False

    async def idle(self) -> None:
        """Returns when nobody is inside."""
        await self._idle.wait()
