"""The exhaustive exploration's state, made of interned parts, and what one event does to one process of it.

What an event does to a process depends on that process alone, so it is computed once for each of its states.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from .small_parts import Instance
from .small_sides import DecodeSide, Output, Side
from .world_parts import need

DECODE, PREFILL = (0, 1), (2, 3)  # numbers of sides
ENDED_ON_D, ENDED_ON_P = ("arrived", "lost", "gone"), ("released", "gone")
Event = tuple[Any, ...]


class SmallLink(NamedTuple):
    """Between one incarnation of each side. What is on its way keeps its order."""

    up: bool = False
    to_decode: tuple[Any, ...] = ()
    to_prefill: tuple[Any, ...] = ()


class State(NamedTuple):
    """Numbers of interned parts. Sides 0 and 1 are decode workers, 2 and 3 prefill workers; -1: not started."""

    sides: tuple[int, int, int, int]
    links: int  # four of them, (decode, prefill) in order
    bound: tuple[tuple[int, int] | None, ...]  # (decode, prefill) side of each request
    late: int  # a message outside of its link; 0: none
    left: tuple[int, ...]  # misfortune, by `MISFORTUNES`


MISFORTUNES = ("breaks", "late", "corrupt", "crash_p", "crash_d", "expire_d", "expire_p", "preempts", "cancels")
BREAK, LATE, CORRUPT, CRASH_P, CRASH_D, EXPIRE_D, EXPIRE_P, PREEMPT, CANCEL = range(len(MISFORTUNES))


class Parts:
    """Knows all parts that states are made of."""

    def __init__(self, instance: Instance) -> None:
        self.instance = instance
        self.reactions: dict[tuple[int, Event], tuple[int, tuple[Output, ...]]] = {}
        self._sides: list[Side] = []
        self._side_names: dict[Any, int] = {}
        self._links: list[tuple[SmallLink, ...]] = []
        self._link_names: dict[tuple[SmallLink, ...], int] = {}
        self._lates: list[Any] = [None]
        self._late_names: dict[Any, int] = {None: 0}
        self._told: dict[Any, tuple[list[str], list[str]]] = {}

    def side(self, state: State, index: int) -> Side:
        """A process as it is."""
        return self._sides[state.sides[index]]

    def link(self, state: State, decode: int, prefill: int) -> SmallLink:
        """Between two sides."""
        return self._links[state.links][2 * decode + prefill - 2]

    def current(self, state: State, role: tuple[int, int]) -> int:
        """The newest side of a role: the one that lives."""
        return role[1] if state.sides[role[1]] >= 0 else role[0]

    def living(self, state: State) -> Iterator[int]:
        """Sides that live."""
        return (i for i, number in enumerate(state.sides) if number >= 0 and self._sides[number].alive)

    def _react(self, state: State, index: int, event: Event) -> State:
        number = state.sides[index]
        known = self.reactions.get((number, event))
        if known is None:
            after, out = self._sides[number].react(event)
            known = self.reactions[number, event] = (self._intern(after), out)
        sides = list(state.sides)
        sides[index] = known[0]
        state = state._replace(sides=tuple(sides))
        for kind, peer, *rest in known[1]:
            other = next(i for i, n in enumerate(state.sides) if n >= 0 and self._sides[n].incarnation == peer)
            if kind == "send":
                state = self._send(state, index, other, rest[0])
            elif self._sides[state.sides[other]].alive:
                state = self._react(state, other, ("written", *rest))
        return state

    def _send(self, state: State, index: int, other: int, message: Any) -> State:
        d, p = min(index, other), max(index, other)
        if not self.link(state, d, p).up:
            return state
        if index == d:
            return self._set_link(state, d, p, lambda link: link._replace(to_prefill=(*link.to_prefill, message)))
        return self._set_link(state, d, p, lambda link: link._replace(to_decode=(*link.to_decode, message)))

    def _set_link(self, state: State, d: int, p: int, change: Callable[[SmallLink], SmallLink]) -> State:
        links = list(self._links[state.links])
        links[2 * d + p - 2] = change(links[2 * d + p - 2])
        return state._replace(links=self._intern_links(tuple(links)))

    def _intern(self, side: Side) -> int:
        name = (side.incarnation, side.name())
        number = self._side_names.setdefault(name, len(self._sides))
        if number == len(self._sides):
            self._sides.append(side)
        return number

    def _intern_links(self, links: tuple[SmallLink, ...]) -> int:
        number = self._link_names.setdefault(links, len(self._links))
        if number == len(self._links):
            self._links.append(links)
        return number

    def _intern_late(self, late: Any) -> int:
        number = self._late_names.setdefault(late, len(self._lates))
        if number == len(self._lates):
            self._lates.append(late)
        return number

    def compare(self, state: State) -> None:
        """Every copy that may still write has its pages to itself."""
        d = self.side(state, self.current(state, DECODE))
        for index in PREFILL:
            p = self._sides[state.sides[index]] if state.sides[index] >= 0 else None
            if p is None or not isinstance(d, DecodeSide) or (not p.alive and p.incarnation in d.told_dead):
                continue
            for flight in p.flights.values():
                copy = flight.copy
                if copy.reader == d.incarnation:
                    hold = d.holds.get((p.incarnation, copy.ticket))
                    need(hold is not None, "a write into pages that its ticket does not hold")
                    right = hold and hold[copy.ordinal : copy.ordinal + len(copy.dst)] == copy.dst
                    need(right, "a write into other pages")

    def status(self, state: State) -> tuple[list[str], list[str]]:
        """Of each request on D and on P."""
        place = (state.sides, state.bound)
        if (known := self._told.get(place)) is not None:
            return known
        told: tuple[list[str], list[str]] = ([], [])
        for key, bound in enumerate(state.bound):
            for i in (0, 1):
                side = self.side(state, bound[i]) if bound else None
                told[i].append("new" if side is None else side.status.get(key, "new") if side.alive else "gone")
        self._told[place] = told
        return told

    def over(self, state: State) -> bool:
        """All requests have ended, all pages are home, no ticket is open."""
        on_d, on_p = self.status(state)
        if not all(status in ENDED_ON_D for status in on_d) or not all(status in ENDED_ON_P for status in on_p):
            return False
        living = {self.side(state, index).incarnation for index in self.living(state)}
        try:
            return all(self.side(state, index).at_rest(living) for index in self.living(state))
        except Exception:
            return False


def less(state: State, misfortune: int) -> State:
    left = list(state.left)
    left[misfortune] -= 1
    return state._replace(left=tuple(left))
