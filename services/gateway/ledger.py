"""What tenants have taken of their limits: places at once, and requests and tokens a minute."""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

from ..security.tenant import Tenant
from .bucket import Bucket

SWEEP = 1024  # tenants with something in a bucket, from which on those with nothing are looked for

Limited = Literal["max_requests", "requests_per_minute", "input_tokens_per_minute", "output_tokens_per_minute"]


class Cost(NamedTuple):
    """What a request takes of its tenant's minute."""

    requests: int = 0
    input_tokens: int = 0
    output_tokens: int = 0


class Refusal(NamedTuple):
    """Which limit is in the way; `limit`: its value, `inside`: places that the tenant has now. `wait_s`: until it is
    refilled, exactly; of `max_requests` None, as that depends on others."""

    limited: Limited
    limit: int
    inside: int
    wait_s: float | None


class Ledger(Protocol):
    """One for all gateway processes that share a port, or one in each.

    It is asked on the event loop, several times a request: an answer comes at once, out of memory. All is in plain
    numbers, by the tenant's name; the limits come with each call, as the file of keys may change. Every `acquire`
    that was granted is followed by one `release` of as many, a `charge` of tokens by one `correct`. What a process had
    acquired when it died is released by whoever shares with it; what it had charged leaks away.
    """

    def acquire(self, tenant: Tenant, places: int) -> Refusal | None:
        """Takes places at once; none of them where they are too many. `places`: at most `limits.max_requests`."""

    def release(self, tenant: Tenant, places: int) -> None:
        """They are free again."""

    def charge(self, tenant: Tenant, cost: Cost) -> Refusal | None:
        """Takes all of it out of the tenant's minute, or nothing; the refusal names what takes longest."""

    def correct(self, tenant: Tenant, charged: Cost, used: Cost) -> None:
        """It became `used`. What was charged too much comes back; too little is owed, and delays what comes next."""

    def inside(self, tenant: Tenant) -> int:
        """Places that it has."""


@dataclass(slots=True)
class _Minute:
    """A tenant's buckets."""

    requests: Bucket = field(default_factory=Bucket)
    input_tokens: Bucket = field(default_factory=Bucket)
    output_tokens: Bucket = field(default_factory=Bucket)


class LocalLedger:
    """Of one process."""

    def __init__(self, clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._clock_ns = clock_ns
        self._places: Counter[str] = Counter()  # of tenants that have some
        self._minutes: dict[str, _Minute] = {}
        self._tenants: dict[str, Tenant] = {}  # the last word on the limits of each of `_minutes`
        self._sweep_at = SWEEP

    def acquire(self, tenant: Tenant, places: int) -> Refusal | None:
        """See `Ledger`."""
        most, inside = tenant.limits.max_requests, self._places[tenant.name]
        if most and inside + places > most:
            return Refusal("max_requests", most, inside, None)
        self._places[tenant.name] = inside + places
        return None

    def release(self, tenant: Tenant, places: int) -> None:
        """See `Ledger`."""
        self._places[tenant.name] -= places
        if self._places[tenant.name] <= 0:
            del self._places[tenant.name]

    def charge(self, tenant: Tenant, cost: Cost) -> Refusal | None:
        """See `Ledger`."""
        asked = self._limited(tenant, cost)
        if not asked:
            return None
        now = self._clock_ns()
        waits = [(bucket.wait_ns(amount, limit, now), name, limit) for name, bucket, amount, limit in asked]
        wait, name, limit = max(waits)
        if wait:
            return Refusal(name, limit, self._places.get(tenant.name, 0), wait / 1e9)
        for _, bucket, amount, limit in asked:
            bucket.add(amount, limit, now)
        return None

    def correct(self, tenant: Tenant, charged: Cost, used: Cost) -> None:
        """See `Ledger`."""
        now = self._clock_ns()
        late = Cost(*(after - before for before, after in zip(charged, used, strict=True)))
        for _, bucket, amount, limit in self._limited(tenant, late):
            bucket.add(amount, limit, now)

    def inside(self, tenant: Tenant) -> int:
        """See `Ledger`."""
        return self._places.get(tenant.name, 0)

    def _limited(self, tenant: Tenant, cost: Cost) -> list[tuple[Limited, Bucket, int, int]]:
        """(limit's name, bucket, amount, limit) of each limit that the tenant has and `cost` touches."""
        limits = tenant.limits
        if not (limits.requests_per_minute or limits.input_tokens_per_minute or limits.output_tokens_per_minute):
            return []
        minute = self._minute(tenant)
        each: list[tuple[Limited, Bucket, int, int | None]] = [
            ("requests_per_minute", minute.requests, cost.requests, limits.requests_per_minute),
            ("input_tokens_per_minute", minute.input_tokens, cost.input_tokens, limits.input_tokens_per_minute),
            ("output_tokens_per_minute", minute.output_tokens, cost.output_tokens, limits.output_tokens_per_minute),
        ]
        return [(name, bucket, amount, limit) for name, bucket, amount, limit in each if limit and amount]

    def _minute(self, tenant: Tenant) -> _Minute:
        minute = self._minutes.get(tenant.name)
        if minute is None:
            if len(self._minutes) >= self._sweep_at:
                self._sweep()
            minute = self._minutes[tenant.name] = _Minute()
        self._tenants[tenant.name] = tenant
        return minute

    def _sweep(self) -> None:
        """Forgets tenants whose buckets are empty: as good as unknown. Tokens may name any number of tenants."""
        now = self._clock_ns()
        for name, minute in list(self._minutes.items()):
            limits = self._tenants[name].limits
            parts = (
                (minute.requests, limits.requests_per_minute),
                (minute.input_tokens, limits.input_tokens_per_minute),
                (minute.output_tokens, limits.output_tokens_per_minute),
            )
            if all(not limit or bucket.empty(limit, now) for bucket, limit in parts):
                del self._minutes[name], self._tenants[name]
        self._sweep_at = max(SWEEP, 2 * len(self._minutes))
