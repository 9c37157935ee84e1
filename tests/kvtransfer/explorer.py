"""Explores everything that can happen to a small instance, breadth first, with the real machines."""

from array import array
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .small_parts import Instance
from .small_state import CORRUPT, CRASH_P, EXPIRE_P, PREEMPT, Event, State
from .small_world import CALM, GOOD, SmallWorld
from .world_parts import Violation


@dataclass
class Found:
    """What came of an exploration."""

    states: int = 0
    edges: int = 0
    ends: int = 0  # states where all is over and home
    reactions: int = 0  # of single processes
    results: set[tuple[tuple[str, str], ...]] = field(default_factory=set)  # how the requests ended, at the ends


class Explorer:
    """Of one instance. `explore` raises Violation, with the events that lead there, where an invariant breaks."""

    def __init__(self, instance: Instance) -> None:
        self.world = SmallWorld(instance)
        self._states: dict[State, int] = {}
        self._came: list[tuple[int, Event]] = []  # from which state, by what
        self._safe: set[tuple[int, ...]] = set()  # combinations of sides that were compared

    def explore(self, *before: Event) -> Found:
        """All states that may follow these events, and that every one of them can still come to a good end."""
        state = self.world.start()
        for event in before:
            state = self.world.after(state, event)
        found, edges = Found(), self._search(state)
        found.states, found.edges, found.reactions = len(self._states), len(edges[0]), len(self.world.reactions)
        over = np.array([self.world.over(state) for state in self._states])
        found.ends = int(over.sum())
        ends = (state for state, ended in zip(self._states, over, strict=True) if ended)
        found.results = {tuple(zip(*self.world.status(state), strict=True)) for state in ends}
        self._check_ends(*edges, over)
        return found

    def _search(self, start: State) -> tuple[Any, Any, Any]:
        """Visits all states; returns the edges between them: from, to, of which kind."""
        sources, targets, kinds = array("i"), array("i"), bytearray()
        self._states[start] = 0
        self._came.append((-1, ()))
        layer = [start]
        while layer:
            following: list[State] = []
            for state in layer:
                here = self._states[state]
                for event, kind in self.world.events(state):
                    after = self._checked(here, state, event)
                    there = self._states.setdefault(after, len(self._came))
                    if there == len(self._came):
                        self._came.append((here, event))
                        following.append(after)
                    if there != here:
                        sources.append(here)
                        targets.append(there)
                        kinds.append(kind)
            layer = following
        return np.frombuffer(sources, np.int32), np.frombuffer(targets, np.int32), np.frombuffer(kinds, np.uint8)

    def _checked(self, here: int, state: State, event: Event) -> State:
        try:
            after = self.world.after(state, event)
            if after.sides not in self._safe:
                self.world.compare(after)
                self._safe.add(after.sides)
            return after
        except Exception as error:
            raise Violation(f"{error}\n{self.story(here, event)}") from error

    def _check_ends(self, sources: Any, targets: Any, kinds: Any, over: Any) -> None:
        """From each state a good end is within reach: of any kind, and where nothing went wrong, with all the KV."""
        stuck = ~_reaching(over, sources, targets, kinds & GOOD)
        if stuck.any():
            raise Violation(
                f"it cannot end any more: pages, tickets or requests are left\n{self.story(stuck.argmax())}"
            )
        ok = np.array([self._undisturbed(state) for state in self._states])
        served = np.array([set(self.world.status(state)[0]) == {"arrived"} for state in self._states])
        served &= over & ok
        denied = ok & ~_reaching(served, sources, targets, kinds & CALM)
        if denied.any():
            raise Violation(f"nothing happened that justifies a loss\n{self.story(denied.argmax())}")

    def _undisturbed(self, state: State) -> bool:
        """Nobody cancelled, crashed or waited for too long; no page was damaged twice."""
        instance, left, told = self.world.instance, state.left, self.world.status(state)
        return (
            left[CRASH_P : EXPIRE_P + 1]
            == (instance.crash_prefill, instance.crash_decode, instance.expiries, instance.expiries)
            and left[CORRUPT] >= instance.corrupt - 1
            and left[PREEMPT] == instance.preempts
            and "gone" not in (*told[0], *told[1])
        )

    def story(self, index: int, *more: Event) -> str:
        """The events that lead to a state."""
        events = list(more)
        while index >= 0:
            index, event = self._came[index]
            events.append(event)
        return "\n".join(f"  {' '.join(map(str, event))}" for event in reversed(events) if event)


def _reaching(ends: Any, sources: Any, targets: Any, wanted: Any) -> Any:
    """States from which one of `ends` can be reached by edges with a `wanted` mark."""
    reach, chosen = ends.copy(), wanted.astype(bool)
    sources, targets = sources[chosen], targets[chosen]
    while True:
        new = targets[:0] if not len(targets) else sources[reach[targets] & ~reach[sources]]
        if not len(new):
            return reach
        reach[new] = True
