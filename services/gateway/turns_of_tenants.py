"""Whose turn it is: tenants one after the other, whatever any of them has waiting."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class TenantTurns(Generic[T]):
    """Queues by tenant, served in rotation: first come, first served within each. Items differ, and can be hashed."""

    def __init__(self) -> None:
        self.total = 0  # items that wait
        self._queues: OrderedDict[str, OrderedDict[T, None]] = (
            OrderedDict()
        )  # none is empty; the next one's comes first

    def waiting(self, tenant: str) -> int:
        """How many this tenant has."""
        return len(self._queues.get(tenant, ()))

    def add(self, tenant: str, item: T) -> None:
        """Behind what this tenant has."""
        self._queues.setdefault(tenant, OrderedDict())[item] = None
        self.total += 1

    def remove(self, tenant: str, item: T) -> None:
        """Wherever it waits; nothing where it does not (any more)."""
        queue = self._queues.get(tenant)
        if queue is not None and item in queue:
            del queue[item]
            self.total -= 1
            if not queue:
                del self._queues[tenant]

    def pop(self, may: Callable[[str], bool] = lambda _: True) -> T | None:
        """The next one, of the tenants that may; None: nobody waits who may."""
        tenant = next((tenant for tenant in self._queues if may(tenant)), None)
        if tenant is None:
            return None
        queue = self._queues.pop(tenant)
        item, _ = queue.popitem(last=False)
        self.total -= 1
        if queue:
            self._queues[tenant] = queue
        return item
