"""A transport that does damage where it writes: what its copies bring is not what was read, or comes late."""

import random
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from twostroke.kvtransfer.cuda_ipc import CudaIpcTransport
from twostroke.kvtransfer.messages import Copy
from twostroke.kvtransfer.transport import Done, ShmTransport, Transport

Pages = np.ndarray[Any, np.dtype[np.uint8]]  # [pages of the copy, bytes]
Damage = Callable[[Pages, Pages, int, random.Random], None]
"""(what lies there now, what lay there before, which page of the copy, chance): changes the first."""


class Target(Protocol):
    """A layer of the peer's pool, [pages, bytes]: an array, or what is read and written like one."""

    def __getitem__(self, rows: list[int], /) -> Pages:
        """A copy of these pages."""
        ...

    def __setitem__(self, rows: list[int], values: Pages, /) -> None:
        """Writes them."""
        ...


LATE = "late"  # arrives whole, in its time
LATE_S = 0.03


def drop(now: Pages, before: Pages, page: int, chance: random.Random) -> None:
    """Nothing is written."""
    now[:] = before


def flip(now: Pages, before: Pages, page: int, chance: random.Random) -> None:
    """One bit of one byte is another."""
    now[page, chance.randrange(now.shape[1])] ^= 1 << chance.randrange(8)


def swap(now: Pages, before: Pages, page: int, chance: random.Random) -> None:
    """Two pages lie in each other's places; a single one, with its halves exchanged."""
    if len(now) > 1:
        now[[page, page - 1]] = now[[page - 1, page]]
    else:
        now[0] = np.roll(now[0], now.shape[1] // 2)


def stale(now: Pages, before: Pages, page: int, chance: random.Random) -> None:
    """One page is what it was before."""
    now[page] = before[page]


def zero(now: Pages, before: Pages, page: int, chance: random.Random) -> None:
    """One page is empty."""
    now[page] = 0


DAMAGE: Mapping[str, Damage] = {f.__name__: f for f in (drop, flip, swap, stale, zero)}


@dataclass
class Faults:
    """What the transports of a worker do, and what they did. Any thread."""

    kinds: tuple[str, ...]
    share: float = 0.2  # of the copies
    again: bool = False  # what is sent again suffers too
    seed: int = 1
    copies: int = 0
    delayed: int = 0
    target: Callable[[int], Target] | None = None  # the peer's pages of a layer, where its pool lies in this process
    damaged: set[tuple[int, int, int, int]] = field(default_factory=set)  # (reader, ticket, round, ordinal)
    _chance: random.Random = field(init=False)
    _rounds: dict[tuple[int, int, int, int], int] = field(default_factory=dict)  # of (reader, ticket, layer, ordinal)
    lock: Any = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self._chance = random.Random(self.seed)

    def draw(self, copy: Copy) -> tuple[int, str]:
        """Which round of its ticket this copy belongs to, and what happens to it; "" for nothing."""
        self.copies += 1
        places = [(copy.reader, copy.ticket, copy.layer, copy.ordinal + i) for i in range(len(copy.dst))]
        round_ = max(self._rounds.get(place, -1) for place in places) + 1
        self._rounds |= dict.fromkeys(places, round_)
        if self._chance.random() >= self.share or (round_ and not self.again):
            return round_, ""
        return round_, self._chance.choice(self.kinds)

    def spoil(self, kind: str, round_: int, copy: Copy, target: Target, before: Pages) -> None:
        """Does the damage and notes which pages have other bytes than they should."""
        rows = list(copy.dst)
        right = target[rows]
        wrong = right.copy()
        DAMAGE[kind](wrong, before, self._chance.randrange(len(rows)), self._chance)
        target[rows] = wrong
        changed = np.flatnonzero((wrong != right).any(axis=1))
        self.damaged |= {(copy.reader, copy.ticket, round_, copy.ordinal + int(i)) for i in changed}


class FaultyTransport:
    """Around another transport; satisfies `Transport`."""

    def __init__(self, inner: Transport, faults: Faults) -> None:
        """`inner`: a `ShmTransport` or a `CudaIpcTransport` unless `faults` has a target."""
        self.kind = inner.kind
        self._layers: Sequence[Target] | None = None  # of a pool on a GPU
        self._inner = inner
        self._faults = faults
        self._late: list[threading.Thread] = []

    def start(self, copy: Copy, done: Done) -> None:
        """See `Transport.start`."""
        with self._faults.lock:
            round_, kind = self._faults.draw(copy)
        if kind == LATE:
            self._start_late(copy, done)
            return
        if not kind:
            self._inner.start(copy, done)
            return
        target = self._target(copy.layer)
        before = target[list(copy.dst)]

        def spoiled(number: int, digests: bytes) -> None:
            with self._faults.lock:
                self._faults.spoil(kind, round_, copy, target, before)
            done(number, digests)

        self._inner.start(copy, spoiled)

    def _start_late(self, copy: Copy, done: Done) -> None:
        """It writes, or is done where it writes by a thread of its own, later and on another thread."""
        self._faults.delayed += 1
        if self.kind == "shm":
            self._later(self._inner.start, copy, done)
        else:
            self._inner.start(copy, lambda *landed: self._later(done, *landed))

    def _later(self, act: Callable[..., None], *arguments: Any) -> None:
        thread = threading.Timer(LATE_S, act, arguments)
        self._late.append(thread)
        thread.start()

    def _target(self, layer: int) -> Target:
        if self._faults.target is not None:
            return self._faults.target(layer)
        if isinstance(self._inner, CudaIpcTransport):
            if self._layers is None:
                from .device_pages import peer_pages

                self._layers = peer_pages(self._inner)
            return self._layers[layer]
        if not isinstance(self._inner, ShmTransport):
            raise TypeError("this transport's target is out of reach")
        return self._inner._mapped()[1][layer]

    def probe(self) -> float:
        """See `Transport`."""
        return self._inner.probe()

    def peer_gone(self) -> None:
        """See `Transport`."""
        self._inner.peer_gone()

    def close(self) -> None:
        """See `Transport`."""
        self._inner.close()
        for thread in self._late:
            thread.join()
