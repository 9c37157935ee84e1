"""The requests under way at the engine door, by name, so that somebody else's call can end them."""

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Protocol

from ....errors import RunningAlready
from ...security.tenant import Tenant


class Aborted(Exception):
    """The request was ended by Abort."""


class Ending:
    """Ends one request from outside. One loop owns it."""

    def __init__(self) -> None:
        self._aborted = False
        self._scope: asyncio.Timeout | None = None

    def abort(self) -> None:
        """Makes the body of `watching` end, wherever it waits. Idempotent; without effect once it has ended."""
        if self._aborted:
            return
        self._aborted = True
        if self._scope is not None:
            self._scope.reschedule(asyncio.get_running_loop().time())

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """The body is cancelled by `abort`, which raises Aborted."""
        if self._aborted:
            raise Aborted
        scope = asyncio.timeout(None)
        try:
            async with scope:
                self._scope = scope
                try:
                    yield
                finally:
                    self._scope = None
        except TimeoutError:
            if not scope.expired():
                raise
            raise Aborted from None


class Names(Protocol):
    """What is under way in other processes too."""

    def take(self, tenant: Tenant, request_id: str) -> bool:
        """False: it is under way."""

    def give_back(self, tenant: Tenant, request_id: str) -> None:
        """What was taken."""


class Running:
    """Names are a tenant's own: nobody ends, or meets, another tenant's requests."""

    def __init__(self, names: Names | None = None) -> None:
        """`names`: where there are other processes."""
        self._names = names
        self._requests: dict[tuple[str, str], Ending] = {}

    def __len__(self) -> int:
        return len(self._requests)

    @contextmanager
    def enter(self, tenant: Tenant, request_id: str) -> Iterator[Ending]:
        """The name is taken for the time of the `with` block. RunningAlready where it is."""
        key = (tenant.name, request_id)
        if key in self._requests or (self._names is not None and not self._names.take(tenant, request_id)):
            raise RunningAlready(f"request {request_id!r} is under way already", field="request_id")
        ending = self._requests[key] = Ending()
        try:
            yield ending
        finally:
            del self._requests[key]
            if self._names is not None:
                self._names.give_back(tenant, request_id)

    def abort(self, tenant: Tenant, request_ids: Iterable[str]) -> int:
        """Ends those of these requests that are under way; how many they were."""
        found = 0
        for request_id in request_ids:
            ending = self._requests.get((tenant.name, request_id))
            if ending is not None:
                ending.abort()
                found += 1
        return found
