"""Names of requests over several processes: taken once, free with their end or their process'."""

import logging
from contextlib import ExitStack

import pytest

from twostroke.errors import RunningAlready
from twostroke.services.gateway.processes.ledger import SharedLedger, _set_of
from twostroke.services.gateway.processes.memory import NAMES, TENANTS, WAYS, SharedMemory, create_file
from twostroke.services.gateway.processes.names import SharedNames
from twostroke.services.gateway.vllm_engine.running import Running
from twostroke.services.security.tenant import Tenant

ACME, OTHER = Tenant("acme"), Tenant("other")


class Process:
    def __init__(self, descriptor: int, index: int) -> None:
        self.memory = SharedMemory(descriptor, 2)
        self.ledger = SharedLedger(self.memory.tables[NAMES], index)
        self.running = Running(SharedNames(self.ledger))


@pytest.fixture
def processes() -> tuple[Process, Process]:
    descriptor = create_file()
    return Process(descriptor, 0), Process(descriptor, 1)


def taken(process: Process, tenant: Tenant = ACME, name: str = "x") -> bool:
    try:
        with process.running.enter(tenant, name):
            return False
    except RunningAlready as error:
        assert error.field == "request_id"
        return True


def test_a_name_is_taken_in_all_processes_until_its_end(processes: tuple[Process, Process]) -> None:
    first, second = processes
    with first.running.enter(ACME, "x"):
        assert taken(first)
        assert taken(second)
        assert not taken(second, OTHER)
        assert not taken(second, ACME, "y")
        assert taken(second)  # whoever was refused gave nothing back
    assert not taken(second)
    with second.running.enter(ACME, "x"):
        assert taken(first)
    assert not any(len(each.running) or each.ledger._known for each in processes)
    for table in (NAMES, TENANTS):
        assert not any(first.memory.tables[table].places)


def test_the_names_of_a_process_that_died_are_free(processes: tuple[Process, Process]) -> None:
    first, second = processes
    assert SharedNames(first.ledger).take(ACME, "x")
    assert taken(second)
    second.memory.forget(0)
    assert not taken(second)


def test_where_there_is_no_room_names_are_told_apart_within_a_process(
    processes: tuple[Process, Process], caplog: pytest.LogCaptureFixture
) -> None:
    first, second = processes
    names, number = [], 0
    while len(names) <= WAYS:  # of one set
        digest = first.ledger._place(f"acme\0{number}")[1]
        names += [str(number)] if _set_of(digest) == 5 else []
        number += 1
    with ExitStack() as stack, caplog.at_level(logging.WARNING):
        for name in names:
            stack.enter_context(first.running.enter(ACME, name))
        assert all(taken(first, ACME, name) for name in names)
        assert [taken(second, ACME, name) for name in names] == [True] * WAYS + [False]
    assert "full" in caplog.text
    assert not any(taken(second, ACME, name) for name in names)
    assert not any(first.memory.tables[NAMES].places)
