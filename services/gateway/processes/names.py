"""Names of requests that are under way in any of the gateway processes: each is taken once at a time."""

from ...security.limits import Limits
from ...security.tenant import Tenant
from .ledger import SharedLedger

ONCE = Limits(max_requests=1)


class SharedNames:
    """A name stands in the shared ledger like a tenant of one place, with all that holds for those: it is free again
    when its process dies, and one for which there is no room, or whose set is locked, is only looked for in its own
    process."""

    def __init__(self, ledger: SharedLedger) -> None:
        """`ledger`: of names alone."""
        self._ledger = ledger

    def take(self, tenant: Tenant, request_id: str) -> bool:
        """False: it is under way."""
        named = _named(tenant, request_id)
        free = self._ledger.acquire(named, 1) is None
        if not free:
            self._ledger.forget(named)
        return free

    def give_back(self, tenant: Tenant, request_id: str) -> None:
        """What was taken."""
        named = _named(tenant, request_id)
        self._ledger.release(named, 1)
        self._ledger.forget(named)


def _named(tenant: Tenant, request_id: str) -> Tenant:
    return Tenant(f"{tenant.name}\0{request_id}", limits=ONCE)
