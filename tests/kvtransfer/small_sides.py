"""A process of the exhaustive exploration: the real machine, and what its worker does around it. Here: decode.

A side reacts to an event, a tuple, with outputs: `("send", peer, message)` and `("write", reader, layer, pages,
values)`. What depends on one process alone is checked here, at every event.
"""

from collections import deque
from collections.abc import Hashable, Iterable
from dataclasses import replace
from typing import Any

from twostroke.kvtransfer.messages import (
    Arrived,
    Instruction,
    Lost,
    Send,
    Ticket,
    Unhold,
    Verify,
)
from twostroke.kvtransfer.reader import Reader

from .small_parts import REPEAT_S, VALID_S, Instance, Namer, SmallFlight, clone
from .world_parts import Job, Value, digest, need

Output = tuple[Any, ...]
Hold = tuple[int, ...]


class Side:
    """What both have. `owned`: pages by request; `status` of each request that it has heard of."""

    def __init__(self, incarnation: int, instance: Instance) -> None:
        self.incarnation = incarnation
        self.alive = True
        self.now = 0.0
        self.owned: dict[int, Hold] = {}
        self.status: dict[int, str] = {}
        self.told_dead: set[int] = set()
        self.flights: dict[int, SmallFlight] = {}
        self._instance = instance

    def react(self, event: tuple[Any, ...]) -> tuple["Side", tuple[Output, ...]]:
        """The side after this event, and what it put out. This one stays as it is."""
        after: Side = clone(self, {})
        out: list[Output] = []
        getattr(after, event[0])(out, *event[1:])
        if after.alive:
            after.check()
        return after, tuple(out)

    def name(self) -> Hashable:
        """Equal names, equal futures."""
        namer = Namer(self.now, sorted(self.flights))
        return namer.name(self)

    def never(self, out: list[Output], key: int) -> None:
        """A request that will not come."""
        self.status[key] = "gone"

    def free(self) -> list[int]:
        """Pages that may be given out; Violation where one has two owners."""
        owned = [page for pages in self.owned.values() for page in pages]
        need(len(owned) == len(set(owned)), "a page is doubly owned")
        return sorted(set(range(1, self._instance.pages + 1)) - set(owned) - set(self.held()))

    def held(self) -> Iterable[int]:
        """Pages that are in use without an owner."""
        raise NotImplementedError

    def check(self) -> None:
        """Raises where an invariant is broken."""
        raise NotImplementedError

    def at_rest(self, living: set[int]) -> bool:
        """Nothing is left: every page is home, no ticket is open."""
        raise NotImplementedError

    def job(self, key: int) -> Job:
        """What values its pages should have."""
        job = self._instance.jobs[key]
        return Job(key, 0, 0, job.total, job.first_page, job.finish)

    def value(self, key: int, layer: int, index: int, ready: int) -> Value:
        """A page's content, once `ready` tokens are written."""
        size = self._instance.page_size
        return (key, layer, index, max(0, min(size, ready - index * size)))

    def pages(self, key: int) -> int:
        """Of a prompt."""
        return -(-self._instance.jobs[key].total // self._instance.page_size)


class DecodeSide(Side):
    """A decode worker. It gives out the lowest free page first, so that pages are used again as soon as may be."""

    def __init__(self, incarnation: int, instance: Instance) -> None:
        super().__init__(incarnation, instance)
        self.reader = Reader(
            layers=instance.layers,
            page_size=instance.page_size,
            pool=incarnation,
            valid_s=VALID_S,
            repeat_s=REPEAT_S,
        )
        self.memory: dict[tuple[int, int], Value] = {}  # (layer, page), of pages in use
        self.holds: dict[tuple[int, int], Hold] = {}  # (writer, ticket)
        self.verifies: list[Verify] = []

    def held(self) -> Iterable[int]:
        pages = [page for hold in self.holds.values() for page in hold]
        need(len(pages) == len(set(pages)), "a page is in two tickets")
        return pages

    def room_for(self, key: int) -> bool:
        return len(self.free()) >= self.pages(key) - self._instance.jobs[key].first_page

    def reserve(self, out: list[Output], key: int, writer: int) -> None:
        first = self._instance.jobs[key].first_page
        pages = tuple(self.free()[: self.pages(key) - first])
        self.status[key], self.owned[key] = "waiting", pages
        ticket, instructions = self.reader.open(writer, key, pages, first * self._instance.page_size, self.now)
        need((writer, ticket) not in self.holds, "a ticket number came twice")
        self.holds[writer, ticket] = pages
        self._run(out, instructions)

    def cancel(self, out: list[Output], key: int) -> None:
        self._end(key, "gone")
        self._run(out, self.reader.request_gone(key, self.now))

    def take(self, out: list[Output], writer: int, message: Any) -> None:
        if message == "up":
            self._run(out, self.reader.writer_up(writer, self.now))
        elif message == "down":
            self._run(out, self.reader.writer_down(writer, self.now))
        else:
            self._run(out, self.reader.receive(writer, message, self.now))

    def tick(self, out: list[Output], seconds: float) -> None:
        self.now += seconds
        self._run(out, self.reader.tick(self.now))

    def dead(self, out: list[Output], writer: int) -> None:
        self.told_dead.add(writer)
        self._run(out, self.reader.writer_dead(writer))

    def written(self, out: list[Output], layer: int, pages: Hold, values: tuple[Value, ...]) -> None:
        for page, value in zip(pages, values, strict=True):
            self.memory[layer, page] = value

    def verify(self, out: list[Output], index: int) -> None:
        self._run(out, self._digested(self.verifies.pop(index)))

    def crash(self, out: list[Output]) -> None:
        """Nothing of it matters any more."""
        self.__init__(self.incarnation, self._instance)  # type: ignore[misc]
        self.alive = False

    def _run(self, out: list[Output], instructions: Iterable[Instruction]) -> None:
        todo = deque(instructions)
        while todo:
            match todo.popleft():
                case Send(peer, message):
                    out.append(("send", peer, _timeless(message)))
                case Verify() as verify:
                    if self._instance.late_verify:
                        self.verifies.append(verify)
                    else:
                        todo.extend(self._digested(verify))
                case Unhold(writer, ticket):
                    need((writer, ticket) in self.holds, "a hold ended twice")
                    del self.holds[writer, ticket]
                case Arrived(key, first, verified):
                    self._arrived(int(str(key)), first, verified)
                case Lost(key, _):
                    self._end(int(str(key)), "lost")
                case other:
                    raise AssertionError(f"a reader said {other}")

    def _digested(self, v: Verify) -> list[Instruction]:
        parts = [
            digest(self.memory.get((v.first_layer + layer, page)), v.ticket, v.first_layer + layer, v.ordinal + i)
            for layer in range(v.layers)
            for i, page in enumerate(v.pages)
        ]
        digests = b"".join(parts)
        return self.reader.digested(v.writer, v.ticket, v.first_layer, v.ordinal, digests, v.layers, len(v.pages))

    def _arrived(self, key: int, first: Any, verified: bool) -> None:
        job, pages = self.job(key), self.owned.get(key, ())
        need(first == job.first(), "another sequence's token 0")
        need(verified or job.finish, "unverified KV would be read")
        for index, page in enumerate(pages if verified else ()):
            for layer in range(self._instance.layers):
                right = self.value(key, layer, job.first_page + index, job.total)
                need(self.memory.get((layer, page)) == right, "wrong KV would be read")
                self.memory[layer, page] = (-2, key, layer, page)  # decode writes its own
        self._end(key, "arrived")

    def _end(self, key: int, how: str) -> None:
        """It decodes in no time: its pages are free at once, unless they are held."""
        need(self.status.get(key) == "waiting", f"{how} after {self.status.get(key)}")
        self.status[key] = how
        del self.owned[key]

    def check(self) -> None:
        free = self.free()
        self.memory = {place: value for place, value in sorted(self.memory.items()) if place[1] not in free}
        self.reader.check(idle=False)
        need(self.reader.open_tickets() == len(self.holds), "holds and tickets differ")
        if not self.reader.open_tickets():
            self.verifies.clear()  # their answers are nobody's

    def at_rest(self, living: set[int]) -> bool:
        if not self.alive:
            return True
        if self.holds or self.owned or len(self.free()) != self._instance.pages:
            return False
        self.reader.check(idle=True)
        return True


def _timeless(message: Any) -> Any:
    """A ticket says for how long it is valid; here that is for ever or no longer."""
    if isinstance(message, Ticket):
        return replace(message, valid_s=VALID_S if message.valid_s > 1.0 else 0.001)
    return message
