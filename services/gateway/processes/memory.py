"""The memory that the gateway processes of one set of addresses share: who has what inside, and what tenants took.

It lies in a file that has no name: whoever inherits its descriptor has it, and it goes with the last of them. Numbers
of a process stand in rows of its own, so that what it had is free again once its row is zero.
"""

import fcntl
import mmap
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from ..board import CELL_BYTES, Board, Cell

MAX_PROCESSES = 32
SETS = 1024  # of slots: a tenant's name decides in which one it stands
WAYS = 16  # slots of a set
SLOTS = SETS * WAYS
DIGEST_BYTES = 16
METER_BYTES = 32  # content (16 bytes), time, and the rate that it leaks at
METERS = 3
SLOT_BYTES = DIGEST_BYTES + METERS * METER_BYTES
PLACE_BYTES = 4
LOCK_S = 0.05  # for a set's lock; it is held for some microseconds, unless its holder gets no time or is frozen
RETRY_S = 0.0001  # between two tries: so that a holder on the same core gets on
RAM_DISK = Path("/dev/shm")

ROW_BYTES = len(Cell) * CELL_BYTES
BOARD_BYTES = MAX_PROCESSES * ROW_BYTES
PLACES_BYTES = MAX_PROCESSES * SLOTS * PLACE_BYTES
TABLE_BYTES = PLACES_BYTES + SLOTS * SLOT_BYTES
TENANTS, WRONG_KEYS, NAMES = range(3)  # tables: whoever fills one displaces nobody in the others
TABLES = 3
SIZE = BOARD_BYTES + TABLES * TABLE_BYTES


def create_file() -> int:
    """A descriptor of a new one, all zero. Pages that are never touched take no memory."""
    folder = RAM_DISK if os.access(RAM_DISK, os.W_OK) else None
    with tempfile.TemporaryFile(dir=folder, prefix="twostroke-gateway-") as file:
        file.truncate(SIZE)
        return os.dup(file.fileno())


class Table:
    """Slots, in sets, each with a lock; and what each process has of each slot."""

    def __init__(self, view: memoryview, locks: "Locks", first_lock: int, count: int) -> None:
        """`count`: of processes."""
        self.count = count
        self.places = view[:PLACES_BYTES].cast("I")  # by process, then slot
        self.slots = view[PLACES_BYTES:]  # bytes
        self._locks = locks
        self._first_lock = first_lock

    def inside(self, slot: int) -> int:
        """Places of a slot, of all processes."""
        return sum(self.places[slot : self.count * SLOTS : SLOTS])

    def locked(self, number: int) -> AbstractContextManager[bool]:
        """A set's lock: see `Locks.held`."""
        return self._locks.held(self._first_lock + number)


class SharedMemory:
    """One process' view of it."""

    def __init__(self, descriptor: int, count: int) -> None:
        """`descriptor`: of `create_file`; it is kept open, and with it the locks. `count`: of processes."""
        self._count = count
        self._view = memoryview(mmap.mmap(descriptor, SIZE))
        self._cells = self._view[:BOARD_BYTES].cast("q")
        locks, starts = Locks(descriptor), [BOARD_BYTES + number * TABLE_BYTES for number in range(TABLES)]
        self.tables = [
            Table(self._view[start : start + TABLE_BYTES], locks, number * SETS, count)
            for number, start in enumerate(starts)
        ]

    def board(self, index: int) -> Board:
        """Of process `index`."""
        return Board(self._cells, index, self._count)

    def forget(self, index: int) -> None:
        """Everything that process `index` had is free again. It must be gone."""
        none = memoryview(bytes(SLOTS * PLACE_BYTES)).cast("I")
        for table in self.tables:
            table.places[index * SLOTS : (index + 1) * SLOTS] = none
        self._view[index * ROW_BYTES : (index + 1) * ROW_BYTES] = bytes(ROW_BYTES)


class Locks:
    """Of bytes of a file, which other processes have too."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._stuck: set[int] = set()  # those that could not be had: they are tried once until they can

    @contextmanager
    def held(self, number: int) -> Iterator[bool]:
        """A lock, in the body of a `with`; False: it could not be had within LOCK_S. The kernel takes it from a
        process that dies. One thread of a process may ask."""
        end = 0.0
        while not self._try(number):
            now = time.monotonic()
            end = end or now + LOCK_S
            if now > end or number in self._stuck:
                self._stuck.add(number)
                yield False
                return
            time.sleep(RETRY_S)
        self._stuck.discard(number)
        try:
            yield True
        finally:
            fcntl.lockf(self._descriptor, fcntl.LOCK_UN, 1, number)

    def _try(self, number: int) -> bool:
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, number)
        except BlockingIOError:
            return False
        return True
