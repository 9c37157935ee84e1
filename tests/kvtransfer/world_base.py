"""The protocol's test world, first half: processes, and what they do when their machines say so."""

from collections import deque
from collections.abc import Callable

from twostroke.kvtransfer.messages import (
    Arrived,
    ClosePool,
    Copy,
    FirstToken,
    Instruction,
    Lost,
    Message,
    Release,
    Send,
    Ticketed,
    Unhold,
    Verify,
)
from twostroke.kvtransfer.reader import Reader
from twostroke.kvtransfer.writer import Writer

from .world_parts import (
    D_PAGES,
    LAYERS,
    P_PAGES,
    PAGE,
    VALID_S,
    Decode,
    Flight,
    Job,
    Link,
    Prefill,
    Violation,
    digest,
    need,
)


class Processes:
    """One decode worker and two prefill workers at a time; the dead stay on the list."""

    def __init__(
        self,
        make_writer: Callable[[], Writer] = lambda: Writer(layers=LAYERS, page_size=PAGE),
        make_reader: Callable[[int], Reader] = lambda pool: Reader(
            layers=LAYERS, page_size=PAGE, pool=pool, valid_s=VALID_S
        ),
        *,
        mix_incarnations: bool = False,
    ) -> None:
        self.make_writer, self.make_reader, self.mix_incarnations = make_writer, make_reader, mix_incarnations
        self.now = 0.0
        self.last_incarnation = 100
        self.last_key = 0
        self.decodes: dict[int, Decode] = {}
        self.prefills: dict[int, Prefill] = {}
        self.links: dict[tuple[int, int], Link] = {}  # (decode, prefill)
        self.limbo: list[tuple[bool, int, int, Message]] = []  # (to prefill?, decode, prefill, message)
        self.jobs: dict[int, Job] = {}
        self.start_decode()
        self.start_prefill()
        self.start_prefill()

    # Processes

    def start_decode(self) -> None:
        self.last_incarnation += 1
        number = self.last_incarnation
        self.decodes[number] = Decode(number, D_PAGES, late=bool(number % 2), reader=self.make_reader(number))

    def start_prefill(self) -> None:
        self.last_incarnation += 1
        number = self.last_incarnation
        self.prefills[number] = Prefill(number, P_PAGES, late=bool(number % 2), writer=self.make_writer())

    def decode(self) -> Decode:
        return next(d for d in self.decodes.values() if d.alive)

    def live_prefills(self) -> list[Prefill]:
        return [p for p in self.prefills.values() if p.alive]

    def link(self, decode: int, prefill: int) -> Link:
        return self.links.setdefault((decode, prefill), Link())

    # What the machines ask for

    def run_prefill(self, p: Prefill, instructions: list[Instruction]) -> None:
        todo = deque(instructions)
        while todo:
            match todo.popleft():
                case Send(peer, message):
                    if self.link(peer, p.incarnation).up:
                        self.link(peer, p.incarnation).to_decode.append(message)
                case Copy() as copy:
                    self._launch(p, copy)
                    if not p.late:
                        self.land(p, copy.copy)
                        todo.extend(self._finish_copy(p, copy.copy))
                case ClosePool(reader):
                    need(reader in p.mapped or reader in p.told_dead, "closes an unknown pool")
                    need(all(f.copy.reader != reader for f in p.flights.values()), "closes a pool under a copy")
                    p.mapped.discard(reader)
                case Ticketed(key):
                    p.ticketed.add(int(str(key)))
                case Release(key):
                    self._release(p, int(str(key)))
                case other:
                    raise Violation(f"a writer said {other}")

    def _launch(self, p: Prefill, copy: Copy) -> None:
        need(copy.reader in p.mapped, "a copy into a closed pool")
        need(copy.reader not in p.told_dead, "a copy for a dead reader")
        need(len(copy.src) == len(copy.dst) > 0, "an empty or lopsided copy")
        owners = {key for key, pages in p.owned.items() if set(pages) & set(copy.src)}
        need(len(owners) == 1, "a copy from pages that nobody owns")
        p.flights[copy.copy] = Flight(copy, owners.pop())

    def land(self, p: Prefill, number: int, corrupt: bool = False) -> None:
        """The write itself; it may come at any time between launch and completion."""
        flight = p.flights[number]
        copy, d = flight.copy, self.decodes[flight.copy.reader]
        need(copy.reader in p.mapped, "a write into a closed pool")
        if d.alive:
            hold = d.holds.get((p.incarnation, copy.ticket))
            need(hold is not None, "a write into pages that its ticket does not hold")
            need(hold and hold[copy.ordinal : copy.ordinal + len(copy.dst)] == copy.dst, "a write into other pages")
        job = self.jobs[flight.key]
        if job.on_prefill == "running":
            need(set(copy.src) <= set(p.owned.get(job.key, [])), "the source pages were given away under a copy")
        values = [p.memory.get((copy.layer, page)) for page in copy.src]
        for page, value in zip(copy.dst, values, strict=True):
            d.memory[copy.layer, page] = (-1, number, 0, 0) if corrupt else value or (0, 0, 0, 0)
        flight.landed = True
        flight.digests = b"".join(digest(v, copy.ticket, copy.layer, copy.ordinal + i) for i, v in enumerate(values))

    def _finish_copy(self, p: Prefill, number: int) -> list[Instruction]:
        flight = p.flights.pop(number)
        return p.writer.copied(number, flight.digests)

    def _release(self, p: Prefill, key: int) -> None:
        job = self.jobs[key]
        need(job.on_prefill == "running", "released what was not there")
        need(all(f.key != key for f in p.flights.values()), "released pages under a copy")
        need(job.answered, "released before token 0")
        job.on_prefill = "released"
        p.owned.pop(key, None)

    def run_decode(self, d: Decode, instructions: list[Instruction]) -> None:
        todo = deque(instructions)
        while todo:
            match todo.popleft():
                case Send(peer, message):
                    if self.link(d.incarnation, peer).up:
                        self.link(d.incarnation, peer).to_prefill.append(message)
                case Verify() as verify:
                    if d.late:
                        d.verifies.append(verify)
                    else:
                        todo.extend(self._verify(d, verify))
                case Unhold(writer, ticket):
                    self._unhold(d, writer, ticket)
                case Arrived(key, first, verified):
                    self._arrived(d, int(str(key)), first, verified)
                case Lost(key, _):
                    self._end(d, int(str(key)), "lost")
                case other:
                    raise Violation(f"a reader said {other}")

    def _verify(self, d: Decode, v: Verify) -> list[Instruction]:
        parts = [
            digest(d.memory.get((v.first_layer + layer, page)), v.ticket, v.first_layer + layer, v.ordinal + i)
            for layer in range(v.layers)
            for i, page in enumerate(v.pages)
        ]
        return d.reader.digested(v.writer, v.ticket, v.first_layer, v.ordinal, b"".join(parts), v.layers, len(v.pages))

    def _unhold(self, d: Decode, writer: int, ticket: int) -> None:
        need((writer, ticket) in d.holds, "a hold ended twice")
        p = self.prefills[writer]
        flights = [
            f for f in p.flights.values() if p.alive and (f.copy.reader, f.copy.ticket) == (d.incarnation, ticket)
        ]
        need(not flights, "a hold ended under a copy")
        del d.holds[writer, ticket]

    def _arrived(self, d: Decode, key: int, first: tuple[FirstToken, ...], verified: bool) -> None:
        job = self.jobs[key]
        need(first == job.first(), "another sequence's token 0")
        need(verified or job.finish, "unverified KV would be read")
        pages = d.owned.get(key, [])
        for index, page in enumerate(pages[: job.pages() - job.first_page] if verified else []):
            for layer in range(LAYERS):
                right = job.value(layer, job.first_page + index, job.total)
                need(d.memory.get((layer, page)) == right, f"wrong KV would be read: {d.memory.get((layer, page))}")
                d.memory[layer, page] = (-2, key, layer, page)  # decode writes its own
        self._end(d, key, "arrived")

    def _end(self, d: Decode, key: int, how: str) -> None:
        job = self.jobs[key]
        need(job.on_decode == "waiting", f"{how} after {job.on_decode}")
        job.on_decode = how
        if how != "arrived":
            del d.owned[key]
