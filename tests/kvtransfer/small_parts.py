"""The exhaustive exploration's instances, and how the state of a machine is copied and compared.

A state's copy and its name are taken from whatever attributes the machines have, so that none is forgotten when one is
added. Left out of the name is only what cannot matter: clocks (what they mean is kept: whether a deadline has passed),
the absolute numbers of copies, and statistics.
"""

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from twostroke.kvtransfer.messages import Copy

from .world_parts import Value

VALID_S, REPEAT_S = 1e9, 1.0  # so that no number of repeats lets a ticket expire
_ATOMS = frozenset({int, str, bytes, bool, float, type(None)})
_COUNTS = frozenset({"now", "_last_copy", "mismatches"})


@dataclass(frozen=True, slots=True)
class SmallJob:
    """A request: its prompt's chunks as rising numbers of tokens, the pages that D has cached, how token 0 ends it."""

    chunks: tuple[int, ...] = (1, 2)
    first_page: int = 0
    finish: int = 0

    @property
    def total(self) -> int:
        return self.chunks[-1]


@dataclass(frozen=True, slots=True)
class Instance:
    """What there is, and how often each misfortune may happen, each at any time."""

    jobs: tuple[SmallJob, ...] = (SmallJob(), SmallJob())
    pages: int = 3  # of either pool, the sink not counted
    layers: int = 1
    page_size: int = 1
    cancels: int = 0  # by clients; the other side is cancelled by the gateway in due course
    breaks: int = 0
    late: int = 0  # deliveries of one message that a broken link should have swallowed
    corrupt: int = 0
    crash_prefill: int = 0
    crash_decode: int = 0
    expiries: int = 0  # on each side
    preempts: int = 0
    late_verify: bool = False  # D digests later, in any order
    progress: bool = True  # P tells how far it is after each step
    lane: bool = False  # what P says of progress and ends may overtake what it said before
    mix_incarnations: bool = False  # a fault of the network's: late messages are taken for the successor's


@dataclass(frozen=True, slots=True)
class SmallFlight:
    """A launched copy that its process has not yet seen completed: it may write at any moment."""

    copy: Copy
    key: int
    values: tuple[Value | None, ...]

    def numbered(self, number: int) -> "SmallFlight":
        return replace(self, copy=replace(self.copy, copy=number))


def clone(value: Any, seen: dict[int, Any]) -> Any:
    """A deep copy that leaves messages and other constants shared."""
    kind = type(value)
    if kind in _ATOMS or kind is tuple or kind is frozenset or isinstance(value, Enum):
        return value
    if kind is dict:
        return {key: clone(item, seen) for key, item in value.items()}
    if kind in (list, deque):
        return kind(clone(item, seen) for item in value)
    if kind is set or kind is bytearray:
        return kind(value)
    if not hasattr(value, "__dict__"):
        return value  # a frozen message
    made = seen.get(id(value))
    if made is None:
        made = seen[id(value)] = kind.__new__(kind)
        made.__dict__.update({name: clone(item, seen) for name, item in value.__dict__.items()})
    return made


class Namer:
    """Names the state of one process: equal names, equal futures."""

    def __init__(self, now: float, copies: list[int]) -> None:
        """`copies`: numbers of the copies under way, in rising order."""
        self._now = now
        self._ranks = {number: rank for rank, number in enumerate(copies)}
        self._seen: dict[int, int] = {}

    def name(self, value: Any) -> Hashable:
        """Hashable, and of the same structure."""
        kind = type(value)
        if kind in _ATOMS or kind is tuple or isinstance(value, Enum):
            return value  # type: ignore[no-any-return]
        if kind is dict:
            return tuple((key, self.name(item)) for key, item in value.items())
        if kind in (list, deque):
            return tuple(self.name(item) for item in value)
        if kind is set:
            return frozenset(value)
        if kind is bytearray:
            return bytes(value)
        if kind is Copy:
            return replace(value, copy=0)
        if kind is SmallFlight:
            return value.numbered(0)
        if not hasattr(value, "__dict__"):
            return value  # type: ignore[no-any-return]
        if id(value) in self._seen:
            return ("again", self._seen[id(value)])
        self._seen[id(value)] = len(self._seen)
        return tuple(self._attribute(*item) for item in value.__dict__.items() if item[0] not in _COUNTS)

    def _attribute(self, name: str, value: Any) -> Hashable:
        if name == "deadline":
            return self._now >= value
        if name == "repeat_at":  # each tick comes after it, so that only whether there is one can matter
            return value > 0.0
        if name in ("outstanding", "copies", "flights"):
            return tuple((self._ranks.get(key), self.name(item)) for key, item in value.items())
        return self.name(value)
