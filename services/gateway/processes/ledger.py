"""What tenants have taken of their limits in all gateway processes of one set of addresses: exact, out of memory.

A tenant stands in one of the slots of the set that its name's digest decides, as in a processor's cache. Places are
kept by process, so that those of one that died are known; its minute is one for all. What is read and then written is
locked by set. A tenant for which there is no slot (all are taken by others), or whose set stays locked because its
holder is frozen, is for that time held to this process' share of its limits.
"""

import hashlib
import logging
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from ...security.tenant import Tenant
from ..bucket import Bucket
from ..ledger import Cost, Limited, LocalLedger, Refusal
from .memory import DIGEST_BYTES, METER_BYTES, METERS, SETS, SLOT_BYTES, SLOTS, WAYS, Table

METER = struct.Struct("<QQqQ")
WORD = (1 << 64) - 1
MOST = (1 << 128) - 1
MAX_KNOWN = 4 * SLOTS  # names whose slot is remembered
WARN_EACH_S = 10.0
NO_DIGEST = bytes(DIGEST_BYTES)
NAMES: tuple[Limited, Limited, Limited] = ("requests_per_minute", "input_tokens_per_minute", "output_tokens_per_minute")

logger = logging.getLogger(__name__)


class SharedLedger:
    """One process' end of it: a `Ledger`."""

    def __init__(self, table: Table, index: int, clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        """`table`: of those who are told apart. `index`: of this process. `clock_ns`: the same for all processes, as
        the system's is."""
        self._table = table
        self._clock_ns = clock_ns
        self._own = index * SLOTS
        self._known: dict[str, tuple[int, bytes]] = {}  # (slot, digest) by name; as it was last seen
        self._alone = LocalLedger(clock_ns)
        self._lent: Counter[str] = Counter()  # places of `_alone`
        self._warned = -WARN_EACH_S

    def acquire(self, tenant: Tenant, places: int) -> Refusal | None:
        """See `Ledger`."""
        with self._slot(tenant) as slot:
            if slot is None:
                return self._acquire_alone(tenant, places)
            most, inside = tenant.limits.max_requests, self._table.inside(slot)
            if most and inside + places > most:
                return Refusal("max_requests", most, inside, None)
            self._table.places[self._own + slot] += places
        return None

    def release(self, tenant: Tenant, places: int) -> None:
        """See `Ledger`. A slot in which this process has places stays where it is, and nobody else writes them."""
        if lent := min(places, self._lent[tenant.name]):
            self._alone.release(tenant, lent)
            self._lent[tenant.name] -= lent
            places -= lent
        if not self._lent[tenant.name]:
            del self._lent[tenant.name]
        if places:
            slot, _ = self._place(tenant.name)
            self._table.places[self._own + slot] -= places

    def charge(self, tenant: Tenant, cost: Cost) -> Refusal | None:
        """See `Ledger`."""
        touched = _touched(tenant, cost)
        if not touched:
            return None
        with self._slot(tenant) as slot:
            if slot is None:
                return self._alone.charge(self._share(tenant, 0), cost)
            now = self._clock_ns()
            asked = [(self._read(slot, which), which, amount, limit) for which, amount, limit in touched]
            wait, which, limit = max((meter.wait_ns(amount, limit, now), w, limit) for meter, w, amount, limit in asked)
            if wait:
                return Refusal(NAMES[which], limit, self._table.inside(slot), wait / 1e9)
            for meter, which, amount, limit in asked:
                self._add(slot, which, meter, amount, limit, now)
        return None

    def correct(self, tenant: Tenant, charged: Cost, used: Cost) -> None:
        """See `Ledger`."""
        late = Cost(*(after - before for before, after in zip(charged, used, strict=True)))
        touched = _touched(tenant, late)
        if not touched:
            return
        with self._slot(tenant) as slot:
            if slot is None:
                self._alone.correct(self._share(tenant, 0), charged, used)
                return
            now = self._clock_ns()
            for which, amount, limit in touched:
                self._add(slot, which, self._read(slot, which), amount, limit, now)

    def inside(self, tenant: Tenant) -> int:
        """See `Ledger`."""
        found = self._known.get(tenant.name)
        shared = self._table.inside(found[0]) if found is not None and self._stands(*found) else 0
        return shared + self._alone.inside(tenant)

    def forget(self, tenant: Tenant) -> None:
        """Of one that has no places here, where it stands. It is looked for anew when it comes again."""
        found = self._known.get(tenant.name)
        if found is not None and not self._table.places[self._own + found[0]]:
            del self._known[tenant.name]

    # Where a tenant stands

    @contextmanager
    def _slot(self, tenant: Tenant) -> Iterator[int | None]:
        """Its slot, locked; None where it has none now."""
        digest = self._place(tenant.name)[1]
        number = _set_of(digest)
        with self._table.locked(number) as locked:
            slot = self._find(tenant.name, digest, number) if locked else None
            if slot is None:
                self._warn("locked" if not locked else "full")
            yield slot

    def _place(self, name: str) -> tuple[int, bytes]:
        """(slot, digest) of a name, as it was last seen."""
        found = self._known.get(name)
        if found is None:
            if len(self._known) >= MAX_KNOWN:
                self._forget_names()
            digest = hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=DIGEST_BYTES).digest()
            found = self._known[name] = (_set_of(digest) * WAYS, digest)
        return found

    def _forget_names(self) -> None:
        """But those of tenants that have places here."""
        places = self._table.places
        self._known = {name: place for name, place in self._known.items() if places[self._own + place[0]]}

    def _find(self, name: str, digest: bytes, number: int) -> int | None:
        """Where it stands, or could: a slot that nobody uses is taken for it."""
        known = self._known[name][0]
        if self._stands(known, digest):
            return known
        first = number * WAYS
        slot = next((at for at in range(first, first + WAYS) if self._stands(at, digest)), None)
        if slot is None:
            slot = next((at for at in range(first, first + WAYS) if self._idle(at)), None)
            if slot is None:
                return None
            start = slot * SLOT_BYTES
            self._table.slots[start : start + SLOT_BYTES] = digest + bytes(SLOT_BYTES - DIGEST_BYTES)
        self._known[name] = (slot, digest)
        return slot

    def _stands(self, slot: int, digest: bytes) -> bool:
        start = slot * SLOT_BYTES
        return self._table.slots[start : start + DIGEST_BYTES] == digest

    def _idle(self, slot: int) -> bool:
        """Whether nobody has places there and all that was charged has leaked: as good as unknown."""
        if self._stands(slot, NO_DIGEST):
            return True
        now = self._clock_ns()
        return not self._table.inside(slot) and all(self._empty(slot, which, now) for which in range(METERS))

    def _empty(self, slot: int, which: int, now: int) -> bool:
        low, high, at, rate = METER.unpack_from(self._table.slots, _meter_at(slot, which))
        return Bucket(high << 64 | low, at).empty(rate, now)

    # Its minute

    def _read(self, slot: int, which: int) -> Bucket:
        low, high, at, _ = METER.unpack_from(self._table.slots, _meter_at(slot, which))
        return Bucket(high << 64 | low, at)

    def _add(self, slot: int, which: int, meter: Bucket, amount: int, limit: int, now: int) -> None:
        meter.add(amount, limit, now)
        content = min(meter.content, MOST)
        METER.pack_into(self._table.slots, _meter_at(slot, which), content & WORD, content >> 64, meter.at_ns, limit)

    # Without the others

    def _acquire_alone(self, tenant: Tenant, places: int) -> Refusal | None:
        refusal = self._alone.acquire(self._share(tenant, places), places)
        if refusal is None:
            self._lent[tenant.name] += places
        return refusal

    def _share(self, tenant: Tenant, places: int) -> Tenant:
        """With this process' share of its limits, which one request always fits into."""
        count, limits = self._table.count, tenant.limits
        most = -(-(limits.max_requests or 0) // count)
        share = replace(
            limits,
            max_requests=max(places, most) if most else 0,
            requests_per_minute=-(-(limits.requests_per_minute or 0) // count),
            input_tokens_per_minute=-(-(limits.input_tokens_per_minute or 0) // count),
            output_tokens_per_minute=-(-(limits.output_tokens_per_minute or 0) // count),
        )
        return replace(tenant, limits=share)

    def _warn(self, why: str) -> None:
        now = time.monotonic()
        if now - self._warned >= WARN_EACH_S:
            self._warned = now
            logger.warning("the shared ledger is %s for a tenant or a name: this process decides by its share", why)


def _set_of(digest: bytes) -> int:
    return int.from_bytes(digest[:4], "little") % SETS


def _meter_at(slot: int, which: int) -> int:
    return slot * SLOT_BYTES + DIGEST_BYTES + which * METER_BYTES


def _touched(tenant: Tenant, cost: Cost) -> list[tuple[int, int, int]]:
    """(meter, amount, limit) of each limit that the tenant has and `cost` touches."""
    limits = tenant.limits
    each = (limits.requests_per_minute, limits.input_tokens_per_minute, limits.output_tokens_per_minute)
    return [
        (which, amount, limit) for which, (amount, limit) in enumerate(zip(cost, each, strict=True)) if limit and amount
    ]
