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
from contextlib import contextmanager
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

BOARD_AT = 0
PLACES_AT = BOARD_AT + MAX_PROCESSES * len(Cell) * CELL_BYTES
SLOTS_AT = PLACES_AT + MAX_PROCESSES * SLOTS * PLACE_BYTES
SIZE = SLOTS_AT + SLOTS * SLOT_BYTES


def create_file() -> int:
    """A descriptor of a new one, all zero. Pages that are never touched take no memory."""
    folder = RAM_DISK if os.access(RAM_DISK, os.W_OK) else None
    with tempfile.TemporaryFile(dir=folder, prefix="twostroke-gateway-") as file:
        file.truncate(SIZE)
        return os.dup(file.fileno())


class SharedMemory:
    """One process' view of it."""

    def __init__(self, descriptor: int, count: int) -> None:
        """`descriptor`: of `create_file`; it is kept open, and with it the locks. `count`: of processes."""
        self.count = count
        self._descriptor = descriptor
        self._stuck: set[int] = set()  # locks that could not be had: they are tried once until they can
        self._map = mmap.mmap(descriptor, SIZE)
        self._view = memoryview(self._map)
        self.slots = self._view[SLOTS_AT:SIZE]  # bytes
        self.places = self._view[PLACES_AT:SLOTS_AT].cast("I")  # by process, then slot
        self._cells = self._view[BOARD_AT:PLACES_AT].cast("q")

    def board(self, index: int) -> Board:
        """Of process `index`."""
        return Board(self._cells, index, self.count)

    def inside(self, slot: int) -> int:
        """Places of a slot, of all processes."""
        return sum(self.places[slot : self.count * SLOTS : SLOTS])

    @contextmanager
    def locked(self, number: int) -> Iterator[bool]:
        """A set's lock, in the body of a `with`; False: it could not be had within LOCK_S. The kernel takes it from a
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

    def forget(self, index: int) -> None:
        """Everything that process `index` had is free again. It must be gone."""
        at, size = PLACES_AT + index * SLOTS * PLACE_BYTES, SLOTS * PLACE_BYTES
        self._view[at : at + size] = bytes(size)
        row = len(Cell) * CELL_BYTES
        self._view[BOARD_AT + index * row : BOARD_AT + (index + 1) * row] = bytes(row)

    def _try(self, number: int) -> bool:
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, number)
        except BlockingIOError:
            return False
        return True
