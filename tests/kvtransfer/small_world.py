"""What may happen to a small instance, and what follows from it.

A freeze is no event: a frozen process is one that takes no step for a while, all orders of steps are explored, and what
goes on during a freeze (its launched copies write, its peer's clock runs, its peer kills it) does so by itself.
"""

from collections.abc import Iterator

from twostroke.kvtransfer.messages import Complete, Progress

from .small_parts import REPEAT_S, VALID_S
from .small_prefill import PrefillSide
from .small_sides import DecodeSide
from .small_state import (
    BREAK,
    CANCEL,
    CORRUPT,
    CRASH_D,
    CRASH_P,
    DECODE,
    EXPIRE_D,
    EXPIRE_P,
    LATE,
    PREEMPT,
    PREFILL,
    Event,
    Parts,
    SmallLink,
    State,
    less,
)

MOST_WAIT = 2  # messages on their way, from where on nothing is repeated
GOOD, CALM = 1, 2  # of an event: no misfortune; neither that nor an expiry nor anyone giving up


class SmallWorld(Parts):
    """Of one instance."""

    def start(self) -> State:
        """One worker each, a link between them."""
        instance = self.instance
        d, p = self._intern(DecodeSide(101, instance)), self._intern(PrefillSide(102, instance))
        left = (instance.breaks, instance.late, instance.corrupt, instance.crash_prefill, instance.crash_decode)
        left += (instance.expiries, instance.expiries, instance.preempts, instance.cancels)
        links = self._intern_links((SmallLink(),) * 4)
        state = State((d, -1, p, -1), links, (None,) * len(instance.jobs), 0, left)
        for event in (("connect", 0, 2), ("to_prefill", 0, 2), ("to_decode", 0, 2)):
            state = self.after(state, event)
        return state

    def events(self, state: State) -> Iterator[tuple[Event, int]]:
        """Each event that may come next, and of which kind it is."""
        d, p = self.current(state, DECODE), self.current(state, PREFILL)
        yield from self._engine_events(state, d, p)
        yield from self._cancels(state, d, p)
        yield from self._link_events(state)
        yield from self._deaths(state, d, p)
        yield from self._clocks(state, d, p)

    def _engine_events(self, state: State, d: int, p: int) -> Iterator[tuple[Event, int]]:
        decode, prefill = self.side(state, d), self.side(state, p)
        if not isinstance(decode, DecodeSide) or not isinstance(prefill, PrefillSide):
            raise TypeError("sides are mixed up")
        for key, bound in enumerate(state.bound):
            if bound is None and any(other is None for other in state.bound[:key]):
                continue  # requests come in order
            if (bound is None or bound[0] == d) and key not in decode.status and decode.room_for(key):
                yield ("reserve", d, key), GOOD | CALM
            if bound is None or bound[1] == p:
                if key not in prefill.status:
                    yield ("expect", p, key), GOOD | CALM
                if prefill.wants_step(key) and prefill.within in (None, (key, prefill.within and prefill.within[1])):
                    yield ("step", p, key), GOOD | CALM
                if prefill.within is None and key in prefill.owned and key not in prefill.ticketed:
                    if self._starved(prefill):
                        yield ("preempt", p, key, 0), GOOD | CALM
                    elif state.left[PREEMPT]:
                        yield ("preempt", p, key, 1), 0
        for rank in range(len(prefill.flights)):
            yield ("seen", p, rank, False), GOOD | CALM
            if state.left[CORRUPT]:
                yield ("seen", p, rank, True), 0
        for index in range(len(decode.verifies)):
            yield ("verify", d, index), GOOD | CALM

    def _starved(self, prefill: PrefillSide) -> bool:
        """Whether a sequence with a ticket lacks pages that one without holds."""
        return any(
            status == "running" and key in prefill.ticketed and key not in prefill.owned and not prefill.wants_step(key)
            for key, status in prefill.status.items()
        )

    def _cancels(self, state: State, d: int, p: int) -> Iterator[tuple[Event, int]]:
        """By the client, or by the gateway because the other side has lost it."""
        for key, bound in enumerate(state.bound):
            if bound is None:
                continue
            on_d, on_p = (status[key] for status in self.status(state))
            mine = state.left[CANCEL] > 0
            if on_d in ("new", "waiting") and bound[0] == d and (mine or on_p == "gone"):
                yield ("cancel", d, key, on_p == "gone"), GOOD if on_p == "gone" else 0
            over = on_d in ("lost", "gone")
            if on_p in ("new", "running") and bound[1] == p and (mine or over):
                prefill = self.side(state, p)
                if not (isinstance(prefill, PrefillSide) and prefill.within):
                    yield ("cancel", p, key, over), GOOD if over else 0

    def _link_events(self, state: State) -> Iterator[tuple[Event, int]]:
        for d in DECODE:
            for p in PREFILL:
                if state.sides[d] < 0 or state.sides[p] < 0:
                    continue
                link = self.link(state, d, p)
                alive = self.side(state, d).alive, self.side(state, p).alive
                if link.to_decode:
                    yield ("to_decode", d, p), GOOD | CALM
                if self.instance.lane:
                    yield from ((("to_decode", d, p, place), 0) for place in _by_lane(link))
                if link.to_prefill:
                    yield ("to_prefill", d, p), GOOD | CALM
                if not link.up and all(alive) and not link.to_decode:
                    yield ("connect", d, p), GOOD | CALM
                if link.up and state.left[BREAK]:
                    yield from ((("break", d, p, late), 0) for late in self._may_be_late(state, link))
        if state.late:
            yield ("late",), 0

    def _may_be_late(self, state: State, link: SmallLink) -> Iterator[tuple[bool, int] | None]:
        """Which of the messages under way outlives its link; None: none does."""
        yield None
        if state.left[LATE] and not state.late:
            for to_prefill, queue in ((False, link.to_decode), (True, link.to_prefill)):
                yield from ((to_prefill, i) for i, message in enumerate(queue) if not isinstance(message, str))

    def _deaths(self, state: State, d: int, p: int) -> Iterator[tuple[Event, int]]:
        if state.left[CRASH_P]:
            yield from ((("crash", p, CRASH_P, words), 0) for words in (True, False))
        if state.left[CRASH_D]:
            yield from ((("crash", d, CRASH_D, words), 0) for words in (True, False))
        for living, other in ((d, PREFILL[0]), (p, DECODE[0])):
            dead = self.side(state, other)
            if not dead.alive and dead.incarnation not in self.side(state, living).told_dead:
                yield ("prove", living, other), GOOD | CALM

    def _clocks(self, state: State, d: int, p: int) -> Iterator[tuple[Event, int]]:
        """Each side's own. Repeats wait until what was said before is nearly read: a link is no endless buffer."""
        waiting = sum(len(link.to_decode) + len(link.to_prefill) for link in self._links[state.links])
        if waiting < MOST_WAIT:
            yield ("tick", d, REPEAT_S), GOOD | CALM
            yield ("tick", p, REPEAT_S), GOOD | CALM
        if state.left[EXPIRE_D]:
            yield ("tick", d, 2 * VALID_S), GOOD
        if state.left[EXPIRE_P]:
            yield ("tick", p, 2 * VALID_S), GOOD

    # What it does

    def after(self, state: State, event: Event) -> State:
        """The state that follows."""
        kind = event[0]
        if kind in ("to_decode", "to_prefill"):
            return self._deliver(state, *event)
        if kind == "connect":
            return self._set_link(state, event[1], event[2], lambda link: _said(link, "up")._replace(up=True))
        if kind == "break":
            return self._break(state, *event[1:])
        if kind == "late":
            return self._late(state)
        if kind == "crash":
            return self._crash(state, *event[1:])
        if kind == "prove":
            state = self._react(state, event[1], ("dead", self.side(state, event[2]).incarnation))
            return self._react(state, event[2], ("buried",)) if event[2] in PREFILL else state
        if kind == "tick":
            if event[2] > REPEAT_S:
                state = less(state, EXPIRE_D if event[1] in DECODE else EXPIRE_P)
            return self._react(state, event[1], ("tick", event[2]))
        if kind == "preempt":
            state = less(state, PREEMPT) if event[3] else state
            return self._react(state, event[1], event[:1] + event[2:3])
        if kind == "seen":
            return self._react(less(state, CORRUPT) if event[3] else state, event[1], ("seen", *event[2:]))
        if kind in ("reserve", "expect"):
            return self._submit(state, *event)
        if kind == "cancel":
            known = event[2] in self.side(state, event[1]).status
            state = state if event[3] else less(state, CANCEL)
            return self._react(state, event[1], ("cancel" if known else "never", event[2]))
        return self._react(state, event[1], (kind, *event[2:]))

    def _submit(self, state: State, kind: str, index: int, key: int) -> State:
        if state.bound[key] is None:
            workers = (self.current(state, DECODE), self.current(state, PREFILL))
            state = state._replace(bound=(*state.bound[:key], workers, *state.bound[key + 1 :]))
        bound = state.bound[key] or (0, 0)
        peer = self.side(state, bound[1] if kind == "reserve" else bound[0])
        return self._react(state, index, (kind, key, peer.incarnation))

    def _deliver(self, state: State, kind: str, d: int, p: int, place: int = 0) -> State:
        """`place`: among what is under way; the first, but for what goes by a lane."""
        link = self.link(state, d, p)
        if kind == "to_decode":
            message, index, peer = link.to_decode[place], d, p
            left = (*link.to_decode[:place], *link.to_decode[place + 1 :])
            state = self._set_link(state, d, p, lambda link: link._replace(to_decode=left))
        else:
            message, index, peer = link.to_prefill[0], p, d
            state = self._set_link(state, d, p, lambda link: link._replace(to_prefill=link.to_prefill[1:]))
        return self._react(state, index, ("take", self.side(state, peer).incarnation, message))

    def _break(self, state: State, d: int, p: int, late: tuple[bool, int] | None) -> State:
        state, link = less(state, BREAK), self.link(state, d, p)
        if late is not None:
            message = (link.to_prefill if late[0] else link.to_decode)[late[1]]
            state = state._replace(late=self._intern_late((late[0], d, p, message)))
        cut = SmallLink(False, *(tuple(m for m in queue if isinstance(m, str)) for queue in link[1:]))
        return self._set_link(state, d, p, lambda _: _said(cut, "down"))

    def _late(self, state: State) -> State:
        """A message that should be lost comes, perhaps for the first time."""
        to_prefill, d, p, message = self._lates[state.late]
        state = less(state, LATE)
        if not state.left[LATE]:
            state = state._replace(late=0)
        if self.instance.mix_incarnations:
            d, p = self.current(state, DECODE), self.current(state, PREFILL)
        index, peer = (p, d) if to_prefill else (d, p)
        if not self.side(state, index).alive:
            return state
        return self._react(state, index, ("take", self.side(state, peer).incarnation, message))

    def _crash(self, state: State, index: int, misfortune: int, words: bool) -> State:
        """`words`: what it had sent still arrives. Its successor starts at once."""
        state = self._react(less(state, misfortune), index, ("crash",))
        for d, p in ((d, p) for d in DECODE for p in PREFILL if index in (d, p)):
            if state.sides[d] < 0 or state.sides[p] < 0:
                continue
            link = self.link(state, d, p)
            kept = link[1 if index == p else 2] if words else ()
            kept += ("down",) if link.up else ()
            cut = SmallLink(False, kept, ()) if index == p else SmallLink(False, (), kept)
            if not self.side(state, p if index == d else d).alive:
                cut = SmallLink()
            state = self._set_link(state, d, p, lambda _, cut=cut: cut)  # type: ignore[misc]
        made = DecodeSide(103, self.instance) if index in DECODE else PrefillSide(104, self.instance)
        sides = list(state.sides)
        sides[index + 1] = self._intern(made)
        return state._replace(sides=tuple(sides))


def _said(link: SmallLink, word: str) -> SmallLink:
    return link._replace(to_decode=(*link.to_decode, word), to_prefill=(*link.to_prefill, word))


def _by_lane(link: SmallLink) -> Iterator[int]:
    """Places of the messages that may overtake what was said before them."""
    yield from (i for i, m in enumerate(link.to_decode) if i and isinstance(m, Progress | Complete))
