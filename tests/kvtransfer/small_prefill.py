"""A prefill worker of the exhaustive exploration; see `small_sides`."""

from collections.abc import Iterable
from typing import Any

from twostroke.kvtransfer.messages import ClosePool, Copy, Instruction, Release, Send, Ticketed
from twostroke.kvtransfer.writer import Writer

from .small_parts import REPEAT_S, Instance, SmallFlight
from .small_sides import Output, Side
from .world_parts import digest, need


class PrefillSide(Side):
    """A prefill worker. A launched copy keeps its source pages, whoever gives them up."""

    def __init__(self, incarnation: int, instance: Instance) -> None:
        super().__init__(incarnation, instance)
        self.writer = Writer(layers=instance.layers, page_size=instance.page_size, repeat_s=REPEAT_S)
        self.done: dict[int, int] = {}  # chunks computed, by request
        self.answered: set[int] = set()  # token 0 went to the gateway
        self.ticketed: set[int] = set()
        self.mapped: set[int] = set()
        self.within: tuple[int, int] | None = None  # a step: its request and the next layer

    def held(self) -> Iterable[int]:
        return [page for flight in self.flights.values() for page in flight.copy.src]

    def wants_step(self, key: int) -> bool:
        if self.within is not None:
            return self.within[0] == key
        chunks = len(self._instance.jobs[key].chunks)
        if self.status.get(key) != "running" or self.done[key] >= chunks:
            return False
        return key in self.owned or len(self.free()) >= self.pages(key)

    def expect(self, out: list[Output], key: int, reader: int) -> None:
        self.status[key], self.done[key] = "running", 0
        self._run(out, self.writer.expect(key, reader))

    def step(self, out: list[Output], key: int) -> None:
        """The next layer of a chunk."""
        job = self._instance.jobs[key]
        pages = self.owned.setdefault(key, tuple(self.free()[: self.pages(key)]))
        layer, ready = self.within[1] if self.within else 0, job.chunks[self.done[key]]
        self.within = (key, layer + 1)
        self._run(out, self.writer.pages_ready(key, range(layer, layer + 1), [*pages, 99], ready, job.total))
        if layer + 1 < self._instance.layers:
            return
        self.within = None
        self.done[key] += 1
        if ready == job.total:
            self.answered.add(key)
            self._run(out, self.writer.prompt_done(key, self.job(key).first()))
        if self._instance.progress:
            self._run(out, self.writer.step_ended())

    def preempt(self, out: list[Output], key: int) -> None:
        del self.owned[key]
        self.done[key] = 0
        self._run(out, self.writer.restarted(key))

    def cancel(self, out: list[Output], key: int) -> None:
        self.status[key] = "gone"
        self.owned.pop(key, None)
        self._run(out, self.writer.request_gone(key))

    def take(self, out: list[Output], reader: int, message: Any) -> None:
        if message == "up":
            if reader not in self.told_dead:
                self.mapped.add(reader)
            pages = self._instance.pages + 1
            self._run(out, self.writer.reader_up(reader, self.now, pool=reader, pool_pages=pages))
        elif message == "down":
            self._run(out, self.writer.reader_down(reader, self.now))
        else:
            self._run(out, self.writer.receive(reader, message, self.now))

    def tick(self, out: list[Output], seconds: float) -> None:
        self.now += seconds
        self._run(out, self.writer.tick(self.now))

    def dead(self, out: list[Output], reader: int) -> None:
        self.told_dead.add(reader)
        self._run(out, self.writer.reader_dead(reader))

    def seen(self, out: list[Output], rank: int, corrupt: bool) -> None:
        """The host sees a copy completed; `corrupt`: its last page is not what was read from the source."""
        number = sorted(self.flights)[rank]
        flight = self.flights.pop(number)
        copy, values = flight.copy, list(flight.values)
        digests = b"".join(digest(v, copy.ticket, copy.layer, copy.ordinal + i) for i, v in enumerate(values))
        if corrupt:
            values[-1] = (-1, copy.layer, copy.dst[-1], 0)
        out.append(("write", copy.reader, copy.layer, copy.dst, tuple(value or (0, 0, 0, 0) for value in values)))
        self._run(out, self.writer.copied(number, digests))

    def crash(self, out: list[Output]) -> None:
        """Its launched copies may still write until its death is proven."""
        flights = {rank: self.flights[number].numbered(rank) for rank, number in enumerate(sorted(self.flights))}
        self.__init__(self.incarnation, self._instance)  # type: ignore[misc]
        self.alive, self.flights = False, flights

    def buried(self, out: list[Output]) -> None:
        """Proven dead."""
        self.flights.clear()

    def _run(self, out: list[Output], instructions: Iterable[Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case Send(peer, message):
                    out.append(("send", peer, message))
                case Copy() as copy:
                    self._launch(copy)
                case ClosePool(reader):
                    need(reader in self.mapped or reader in self.told_dead, "closes an unknown pool")
                    need(all(f.copy.reader != reader for f in self.flights.values()), "closes a pool under a copy")
                    self.mapped.discard(reader)
                case Ticketed(key):
                    self.ticketed.add(int(str(key)))
                case Release(key):
                    self._release(int(str(key)))
                case other:
                    raise AssertionError(f"a writer said {other}")

    def _launch(self, copy: Copy) -> None:
        need(copy.reader in self.mapped, "a copy into a closed pool")
        need(copy.reader not in self.told_dead, "a copy for a dead reader")
        need(len(copy.src) == len(copy.dst) > 0, "an empty or lopsided copy")
        owners = {key for key, pages in self.owned.items() if set(pages) & set(copy.src)}
        need(len(owners) == 1, "a copy from pages that nobody owns")
        key = owners.pop()
        job, pages = self._instance.jobs[key], self.owned[key]
        step = self.done[key] + (self.within is not None and self.within[0] == key and copy.layer < self.within[1])
        ready = job.chunks[step - 1] if step else 0
        values = tuple(self.value(key, copy.layer, pages.index(page), ready) for page in copy.src)
        self.flights[copy.copy] = SmallFlight(copy, key, values)

    def _release(self, key: int) -> None:
        need(self.status.get(key) == "running", "released what was not there")
        need(all(flight.key != key for flight in self.flights.values()), "released pages under a copy")
        need(key in self.answered, "released before token 0")
        self.status[key] = "released"
        self.owned.pop(key, None)

    def check(self) -> None:
        self.free()
        self.writer.check(idle=False)

    def at_rest(self, living: set[int]) -> bool:
        if not self.alive:
            return True
        if self.owned or self.flights or not self.mapped <= living or len(self.free()) != self._instance.pages:
            return False
        self.writer.check(idle=True)
        return True
