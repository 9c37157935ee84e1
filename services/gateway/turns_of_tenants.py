"""Whose turn it is: tenants one after the other, whatever any of them has waiting."""

from collections import OrderedDict, deque
from typing import Generic, TypeVar

T = TypeVar("T")


class TenantTurns(Generic[T]):
    """Queues by tenant, served in rotation: first come, first served within each."""

    def __init__(self) -> None:
        self._queues: OrderedDict[str, deque[T]] = OrderedDict()  # none is empty; the next one's comes first

    def waiting(self, tenant: str) -> int:
        """How many this tenant has."""
        return len(self._queues.get(tenant, ()))

    def add(self, tenant: str, item: T) -> None:
        """Behind what this tenant has."""
        self._queues.setdefault(tenant, deque()).append(item)

    def remove(self, tenant: str, item: T) -> None:
        """Wherever it waits; nothing where it does not (any more)."""
        queue = self._queues.get(tenant)
        if queue is not None and item in queue:
            queue.remove(item)
            if not queue:
                del self._queues[tenant]

    def pop(self) -> T | None:
        """The next one; None: nobody waits."""
        if not self._queues:
            return None
        tenant, queue = self._queues.popitem(last=False)
        item = queue.popleft()
        if queue:
            self._queues[tenant] = queue
        return item
