"""The shared ledger: several processes' ends of it are, together, one ledger; what a dead one had is free again."""

import asyncio
import os
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twostroke.services.gateway.ledger import Cost, LocalLedger, Refusal
from twostroke.services.gateway.processes.ledger import SharedLedger, _set_of
from twostroke.services.gateway.processes.memory import SETS, SLOT_BYTES, WAYS, SharedMemory, create_file
from twostroke.services.security.limits import MOST_PER_MINUTE, Limits
from twostroke.services.security.tenant import Tenant

COUNT = 3
NAMES = ("", "acme", "umbrella", "x" * 128)
LIMITS = (Limits(), Limits(max_requests=3), Limits(4, 60, 1000, 70), Limits(1, 0, MOST_PER_MINUTE, 0))
S = 1_000_000_000


class Clock:
    now = 5 * S

    def __call__(self) -> int:
        return self.now


class Rig:
    """Processes that share a memory, each with a mapping of its own; one plain ledger as what they must be like."""

    def __init__(self, descriptor: int) -> None:
        self.clock = Clock()
        self.memories = [SharedMemory(descriptor, COUNT) for _ in range(COUNT)]
        self.ledgers = [SharedLedger(memory.tables[0], i, self.clock) for i, memory in enumerate(self.memories)]
        self.plain = LocalLedger(self.clock)
        self.held: list[Counter[str]] = [Counter() for _ in range(COUNT)]

    def die(self, index: int) -> None:
        """As the parent tidies up after a process, and starts another one."""
        self.memories[-1].forget(index)
        for name, places in self.held[index].items():
            self.plain.release(Tenant(name), places)
        self.held[index].clear()
        self.ledgers[index] = SharedLedger(self.memories[index].tables[0], index, self.clock)

    def check(self) -> None:
        """Everybody sees what everybody has."""
        for name in NAMES:
            told = {ledger.inside(Tenant(name)) for ledger in self.ledgers if name in ledger._known}
            assert told <= {self.plain.inside(Tenant(name))}
            assert sum(held[name] for held in self.held) == self.plain.inside(Tenant(name))


@contextmanager
def rig() -> Iterator[Rig]:
    descriptor = create_file()
    try:
        yield Rig(descriptor)
    finally:
        os.close(descriptor)


COSTS = st.builds(Cost, st.integers(0, 3), st.integers(0, 700), st.integers(0, 90))
STEP = st.tuples(
    st.sampled_from(("acquire", "acquire", "release", "charge", "charge", "correct", "wait", "die")),
    st.integers(0, COUNT - 1),
    st.sampled_from(NAMES),
    st.sampled_from(LIMITS),
    st.integers(1, 4),
    COSTS,
    COSTS,
)


@settings(deadline=None, max_examples=40)
@given(st.lists(STEP, max_size=40))
def test_several_ends_are_one_ledger(steps: list[tuple[str, int, str, Limits, int, Cost, Cost]]) -> None:
    with rig() as it:
        for what, index, name, limits, places, cost, used in steps:
            tenant, ledger = Tenant(name, limits=limits), it.ledgers[index]
            if what == "acquire":
                places = min(places, limits.max_requests or places)
                refusal = ledger.acquire(tenant, places)
                assert refusal == it.plain.acquire(tenant, places)
                it.held[index][name] += 0 if refusal else places
            elif what == "release" and it.held[index][name]:
                places = min(places, it.held[index][name])
                ledger.release(tenant, places)
                it.plain.release(tenant, places)
                it.held[index][name] -= places
            elif what == "charge":
                mine, plain = ledger.charge(tenant, cost), it.plain.charge(tenant, cost)
                assert (mine is None) == (plain is None)
                assert mine is None or plain is None or mine.wait_s == plain.wait_s
            elif what == "correct":
                ledger.correct(tenant, cost, used)
                it.plain.correct(tenant, cost, used)
            elif what == "wait":
                it.clock.now += places * S
            elif what == "die":
                it.die(index)
            it.check()
        for index in range(COUNT):
            it.die(index)
        assert not any(it.memories[0].tables[0].places)


def crowd(count: int) -> list[Tenant]:
    """Tenants that all stand in one set."""
    import hashlib

    found: list[Tenant] = []
    number = 0
    while len(found) < count:
        name = f"t{number}"
        if _set_of(hashlib.blake2b(name.encode(), digest_size=16).digest()) == 7:
            found.append(Tenant(name, limits=Limits(max_requests=6)))
        number += 1
    return found


def test_without_a_slot_a_process_has_its_share(caplog: pytest.LogCaptureFixture) -> None:
    with rig() as it:
        tenants = crowd(WAYS + 1)
        for tenant in tenants[:WAYS]:
            assert it.ledgers[0].acquire(tenant, 1) is None
        late = tenants[WAYS]
        for ledger in it.ledgers:
            assert ledger.acquire(late, 1) is None
            assert ledger.acquire(late, 1) is None
            assert ledger.acquire(late, 1) == Refusal("max_requests", 2, 2, None)
        assert sum("full" in record.message for record in caplog.records) == COUNT
        it.ledgers[0].release(tenants[0], 1)  # a slot is free: the others' places count there, the lent ones do not
        assert it.ledgers[1].acquire(late, 3) is None
        it.ledgers[1].release(late, 4)
        it.ledgers[1].release(late, 1)
        assert it.ledgers[1].inside(late) == 0
        for ledger in (it.ledgers[0], it.ledgers[2]):
            ledger.release(late, 2)
            assert ledger.inside(late) == 0
        for tenant in tenants[1:WAYS]:
            it.ledgers[0].release(tenant, 1)
        assert not any(it.memories[0].tables[0].places)


def test_a_slot_is_kept_until_what_was_charged_has_leaked() -> None:
    with rig() as it:
        limits = Limits(requests_per_minute=60)
        tenants = [Tenant(tenant.name, limits=limits) for tenant in crowd(WAYS + 1)]
        for tenant in tenants[:WAYS]:
            assert it.ledgers[0].charge(tenant, Cost(60)) is None
        assert it.ledgers[1].charge(tenants[WAYS], Cost(21)) is None  # alone: it holds 20, more only when it is empty
        assert it.ledgers[1].charge(tenants[WAYS], Cost(1)) is not None
        assert it.ledgers[1].charge(tenants[0], Cost(1)) == Refusal("requests_per_minute", 60, 0, 1.0)
        it.clock.now += 60 * S
        assert it.ledgers[1].charge(tenants[WAYS], Cost(60)) is None
        assert it.ledgers[2].charge(tenants[WAYS], Cost(1)) is not None


HAMMER = """
import sys
from twostroke.services.gateway.ledger import Cost
from twostroke.services.gateway.processes import memory
from twostroke.services.gateway.processes.ledger import SharedLedger
from twostroke.services.gateway.processes.memory import SharedMemory
from twostroke.services.security.limits import Limits
from twostroke.services.security.tenant import Tenant
memory.LOCK_S = 60
ledger = SharedLedger(SharedMemory(int(sys.argv[1]), 2).tables[0], int(sys.argv[2]), lambda: 0)
tenant = Tenant("acme", limits=Limits(max_requests=3, requests_per_minute=1_000_000_000))
print("ready", flush=True)
sys.stdin.readline()
granted = 0
for _ in range(2000):
    if ledger.acquire(tenant, 2) is None:
        assert ledger.inside(tenant) == 2
        ledger.release(tenant, 2)
        granted += 1
    assert ledger.charge(tenant, Cost(1)) is None
print(granted)
"""

HOLD = """
import sys
from twostroke.services.gateway.processes.memory import SharedMemory
with SharedMemory(int(sys.argv[1]), 2).tables[0].locked(int(sys.argv[2])) as locked:
    print(locked, flush=True)
    sys.stdin.readline()
"""


async def child(code: str, descriptor: int, number: int) -> asyncio.subprocess.Process:
    pipe = asyncio.subprocess.PIPE
    command = (sys.executable, "-c", code, str(descriptor), str(number))
    return await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, pass_fds=(descriptor,))


async def test_processes_that_decide_at_the_same_time() -> None:
    """Two can never be inside of three places, and no charge is lost."""
    descriptor = create_file()
    processes = [await child(HAMMER, descriptor, index) for index in range(2)]
    for process in processes:
        assert process.stdout is not None
        assert await process.stdout.readline() == b"ready\n"
    told = await asyncio.gather(*(process.communicate(b"\n") for process in processes))
    assert all(int(out) > 0 for out, _ in told)
    assert [process.returncode for process in processes] == [0, 0]
    memory = SharedMemory(descriptor, 2)
    assert not any(memory.tables[0].places)
    tenant = Tenant("acme", limits=Limits(requests_per_minute=4001))
    ledger = SharedLedger(memory.tables[0], 0, lambda: 0)
    assert ledger.charge(tenant, Cost(1)) is None
    assert ledger.charge(tenant, Cost(1)) is not None
    os.close(descriptor)


async def test_a_frozen_holder_of_a_lock_holds_nobody_up_for_long(caplog: pytest.LogCaptureFixture) -> None:
    descriptor = create_file()
    tenant = crowd(1)[0]
    holder = await child(HOLD, descriptor, 7)
    assert holder.stdout is not None
    assert await holder.stdout.readline() == b"True\n"
    ledger = SharedLedger(SharedMemory(descriptor, 2).tables[0], 0)
    assert ledger.acquire(tenant, 3) is None
    assert ledger.acquire(tenant, 1) == Refusal("max_requests", 3, 3, None)
    assert [record.message for record in caplog.records if "locked" in record.message]
    holder.kill()  # the kernel takes the lock from it
    await holder.wait()
    assert ledger.acquire(tenant, 6) is None
    ledger.release(tenant, 6)
    ledger.release(tenant, 3)
    assert ledger.inside(tenant) == 0
    os.close(descriptor)


def test_names_are_spread_and_forgotten() -> None:
    """More names than are remembered: those with places stay known."""
    with rig() as it:
        ledger = it.ledgers[0]
        assert ledger.acquire(Tenant("kept"), 1) is None
        for number in range(70_000):
            ledger._place(f"n{number}")
        assert len(ledger._known) < 70_000
        ledger.release(Tenant("kept"), 1)
        assert not any(it.memories[0].tables[0].places)
        assert SLOT_BYTES * SETS * WAYS < 4 << 20
