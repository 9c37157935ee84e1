"""A small world for the ticket protocol: decode and prefill workers around the real machines, and a bad network.

Everything that may vary is drawn by a `Pick`, so that hypothesis or a seeded generator can lead it. Pages hold values
that name what was written there; each event is checked at once, and `settle` brings all to rest.
"""

from twostroke.kvtransfer.messages import Complete, Progress

from .world_base import Processes
from .world_parts import D_PAGES, LAYERS, P_PAGES, PAGE, Job, Link, Pick, Prefill, Violation, need

__all__ = ["ACTIONS", "Violation", "World"]


class World(Processes):
    """One decode worker and two prefill workers at a time; each method is an event that may happen at any time."""

    # What may happen

    def submit(self, pick: Pick) -> None:
        """A new request; the two workers hear of it when they do."""
        if len([j for j in self.jobs.values() if j.on_decode == "new" or j.on_prefill == "new"]) >= 4:
            return
        self.last_key += 1
        total = 1 + pick(4 * PAGE)
        first_page = pick(-(-total // PAGE) + 1) if pick(3) == 0 else 0
        if first_page * PAGE > total:
            first_page = 0
        p = self.live_prefills()[pick(len(self.live_prefills()))]
        job = Job(self.last_key, self.decode().incarnation, p.incarnation, total, first_page, int(pick(8) == 0))
        self.jobs[job.key] = job

    def reserve(self, pick: Pick) -> None:
        """The decode worker sets pages aside and opens a ticket."""
        d = self.decode()
        jobs = [j for j in self.jobs.values() if j.on_decode == "new" and j.decode == d.incarnation]
        if d.frozen or not jobs:
            return
        job = jobs[pick(len(jobs))]
        count = job.pages() - job.first_page
        free = d.free()
        if len(free) < count:
            return
        offset = pick(len(free)) if free else 0
        pages = (free[offset:] + free[:offset])[:count]
        job.on_decode, d.owned[job.key] = "waiting", pages
        ticket, out = d.reader.open(job.prefill, job.key, pages, job.first_page * PAGE, self.now)
        need((job.prefill, ticket) not in d.holds, "a ticket number came twice")
        d.holds[job.prefill, ticket] = tuple(pages)
        self.run_decode(d, out)

    def expect(self, pick: Pick) -> None:
        """The prefill worker is given the request."""
        for p in self.live_prefills():
            jobs = [j for j in self.jobs.values() if j.on_prefill == "new" and j.prefill == p.incarnation]
            if jobs and not p.frozen:
                job = jobs[pick(len(jobs))]
                job.on_prefill, p.ready[job.key] = "running", 0
                self.run_prefill(p, p.writer.expect(job.key, job.decode))

    def step(self, pick: Pick) -> None:
        """An engine step of a prefill worker: one chunk of one prompt."""
        p = self.live_prefills()[pick(len(self.live_prefills()))]
        jobs = [self.jobs[key] for key, ready in p.ready.items() if self._wants_step(p, self.jobs[key], ready)]
        if p.frozen or not jobs:
            return
        job = jobs[pick(len(jobs))]
        free = p.free()
        if job.key not in p.owned and len(free) < job.pages():
            return
        pages = p.owned.setdefault(job.key, free[: job.pages()])
        old = p.ready[job.key]
        ready = p.ready[job.key] = min(job.total, old + 1 + pick(2 * PAGE))
        for layer in range(LAYERS):
            for index in range(old // PAGE, -(-ready // PAGE)):
                p.memory[layer, pages[index]] = job.value(layer, index, ready)
            self.run_prefill(p, p.writer.pages_ready(job.key, range(layer, layer + 1), [*pages, 99], ready, job.total))
        if ready == job.total and not (job.answered and pick(2)):
            job.answered = True
            self.run_prefill(p, p.writer.prompt_done(job.key, job.first()))
        self.run_prefill(p, p.writer.step_ended())

    def _wants_step(self, p: Prefill, job: Job, ready: int) -> bool:
        return job.on_prefill == "running" and ready < job.total

    def preempt(self, pick: Pick) -> None:
        """A prefill worker takes the pages of a sequence that has no ticket; it will be computed again."""
        p = self.live_prefills()[pick(len(self.live_prefills()))]
        keys = [k for k in p.owned if k not in p.ticketed and self.jobs[k].on_prefill == "running"]
        if p.frozen or not keys:
            return
        key = keys[pick(len(keys))]
        for page in p.owned.pop(key):
            for layer in range(LAYERS):
                p.memory[layer, page] = (-3, page, layer, 0)  # somebody else's now
        p.ready[key] = 0
        self.run_prefill(p, p.writer.restarted(key))

    def cancel_on_decode(self, pick: Pick) -> None:
        d = self.decode()
        jobs = [j for j in self.jobs.values() if j.on_decode == "waiting" and j.decode == d.incarnation]
        if jobs and not d.frozen:
            job = jobs[pick(len(jobs))]
            self._end(d, job.key, "gone")
            self.run_decode(d, d.reader.request_gone(job.key, self.now))

    def cancel_on_prefill(self, pick: Pick) -> None:
        jobs = [j for j in self.jobs.values() if j.on_prefill in ("new", "running") and self.prefills[j.prefill].alive]
        if jobs:
            self._drop(jobs[pick(len(jobs))])

    def _drop(self, job: Job) -> None:
        p = self.prefills[job.prefill]
        if not p.frozen:
            job.on_prefill = "gone"
            p.owned.pop(job.key, None)
            self.run_prefill(p, p.writer.request_gone(job.key))

    def finish(self, pick: Pick) -> None:
        """A decoding sequence ends and its pages go to others."""
        d = self.decode()
        keys = [key for key in d.owned if self.jobs[key].on_decode == "arrived"]
        if keys:
            del d.owned[keys[pick(len(keys))]]

    def land_some(self, pick: Pick) -> None:
        """Launched copies write, one of them perhaps wrongly. The device goes on while its process is frozen."""
        for p in self.live_prefills():
            for number in [n for n, f in p.flights.items() if not f.landed and pick(2)]:
                self.land(p, number, corrupt=pick(6) == 0)

    def see_copies(self, pick: Pick) -> None:
        """A prefill worker sees copies completed, in any order."""
        for p in self.live_prefills():
            for number in list(p.flights):
                if not p.frozen and pick(3):
                    if not p.flights[number].landed:
                        self.land(p, number)
                    self.run_prefill(p, self._finish_copy(p, number))

    def verify_some(self, pick: Pick) -> None:
        d = self.decode()
        while d.verifies and not d.frozen and pick(4):
            self.run_decode(d, self._verify(d, d.verifies.pop(pick(len(d.verifies)))))

    def deliver(self, pick: Pick) -> None:
        """The next events of every link reach their ends."""
        for (decode, prefill), link in list(self.links.items()):
            for _ in range(pick(4)):
                self._to_decode(decode, prefill, link, pick)
            for _ in range(pick(4)):
                self._to_prefill(decode, prefill, link)

    def _to_decode(self, decode: int, prefill: int, link: Link, pick: Pick = lambda n: 0) -> None:
        d = self.decodes[decode]
        if d.alive and not d.frozen and link.to_decode:
            by_lane = [i for i, m in enumerate(link.to_decode) if isinstance(m, Progress | Complete)]
            place = by_lane[pick(len(by_lane))] if by_lane and pick(2) else 0  # overtakes what was said before
            event = link.to_decode[place]
            del link.to_decode[place]
            if event == "up":
                self.run_decode(d, d.reader.writer_up(prefill, self.now))
            elif event == "down":
                self.run_decode(d, d.reader.writer_down(prefill, self.now))
            elif not isinstance(event, str):
                self.run_decode(d, d.reader.receive(prefill, event, self.now))  # type: ignore[arg-type]

    def _to_prefill(self, decode: int, prefill: int, link: Link) -> None:
        p = self.prefills[prefill]
        if p.alive and not p.frozen and link.to_prefill:
            event = link.to_prefill.popleft()
            if event == "up":
                if decode not in p.told_dead:
                    p.mapped.add(decode)
                self.run_prefill(p, p.writer.reader_up(decode, self.now, pool=decode, pool_pages=D_PAGES))
            elif event == "down":
                self.run_prefill(p, p.writer.reader_down(decode, self.now))
            elif not isinstance(event, str):
                self.run_prefill(p, p.writer.receive(decode, event, self.now))  # type: ignore[arg-type]

    def connect(self, pick: Pick) -> None:
        for p in self.live_prefills():
            link = self.link(self.decode().incarnation, p.incarnation)
            if not link.up:
                link.up = True
                link.to_prefill.append("up")
                link.to_decode.append("up")

    def disconnect(self, pick: Pick) -> None:
        pairs = [pair for pair, link in self.links.items() if link.up]
        if pairs:
            self._break(pairs[pick(len(pairs))], pick)

    def _break(self, pair: tuple[int, int], pick: Pick) -> None:
        """What was under way is lost, or comes later than what follows it."""
        link = self.links[pair]
        for to_prefill, queue in ((True, link.to_prefill), (False, link.to_decode)):
            events = list(queue)
            queue.clear()
            for event in events:
                if isinstance(event, str):
                    queue.append(event)
                elif pick(2) and len(self.limbo) < 20:
                    self.limbo.append((to_prefill, *pair, event))
            queue.append("down")
        link.up = False

    def late_message(self, pick: Pick) -> None:
        """A message of an earlier link comes, perhaps again."""
        if self.limbo:
            i = pick(len(self.limbo))
            to_prefill, decode, prefill, message = self.limbo[i]
            if pick(2):
                del self.limbo[i]
            if self.mix_incarnations:
                decode = self.decode().incarnation
                prefill = prefill if self.prefills[prefill].alive else self.live_prefills()[-1].incarnation
            side = Link(up=True)
            (side.to_prefill if to_prefill else side.to_decode).append(message)
            if to_prefill:
                self._to_prefill(decode, prefill, side)
            else:
                self._to_decode(decode, prefill, side)

    def freeze(self, pick: Pick) -> None:
        workers = [self.decode(), *self.live_prefills()]
        workers[pick(len(workers))].frozen = True

    def thaw(self, pick: Pick) -> None:
        for worker in [self.decode(), *self.live_prefills()]:
            worker.frozen = False

    def crash_prefill(self, pick: Pick) -> None:
        p = self.live_prefills()[pick(len(self.live_prefills()))]
        self.land_some(pick)
        p.alive = False
        for pair, link in self.links.items():
            if pair[1] == p.incarnation and link.up:
                self._break(pair, pick)
        for job in self.jobs.values():
            if job.prefill == p.incarnation:
                job.on_prefill = "gone"
        self.start_prefill()

    def crash_decode(self, pick: Pick) -> None:
        d = self.decode()
        d.alive = False
        for pair, link in self.links.items():
            if pair[0] == d.incarnation and link.up:
                self._break(pair, pick)
        for job in self.jobs.values():
            if job.decode == d.incarnation and job.on_decode != "arrived":
                job.on_decode = "gone"
        self.start_decode()

    def prove_deaths(self, pick: Pick) -> None:
        """The living learn which peers are dead."""
        d = self.decode()
        for p in self.prefills.values():
            if not d.frozen and not p.alive and p.incarnation not in d.told_dead and pick(4):
                d.told_dead.add(p.incarnation)
                self.run_decode(d, d.reader.writer_dead(p.incarnation))
        for p in self.live_prefills():
            for dead in self.decodes.values():
                if not p.frozen and not dead.alive and dead.incarnation not in p.told_dead and pick(4):
                    p.told_dead.add(dead.incarnation)
                    self.run_prefill(p, p.writer.reader_dead(dead.incarnation))

    def tick(self, pick: Pick) -> None:
        self.now += (0.3, 1.1, 4.0)[pick(3)]
        d = self.decode()
        if not d.frozen:
            self.run_decode(d, d.reader.tick(self.now))
        for p in self.live_prefills():
            if not p.frozen:
                self.run_prefill(p, p.writer.tick(self.now))

    # Checks

    def check(self) -> None:
        self.decode().free()
        self.decode().reader.check(idle=False)
        need(self.decode().reader.open_tickets() == len(self.decode().holds), "holds and tickets differ")
        for p in self.live_prefills():
            p.free()
            p.writer.check(idle=False)

    def settle(self) -> None:
        """Lets everything come to rest, in good weather, and checks that nothing is left."""

        def most(n: int) -> int:
            return n - 1

        self.thaw(most)
        for round_ in range(60):
            busy = [j for j in self.jobs.values() if j.on_decode in ("new", "waiting")]
            if round_ == 30:  # workers that never heard of a request never will
                for job in [j for j in self.jobs.values() if j.on_prefill in ("new", "running") and j not in busy]:
                    self._drop(job)
            for action in (self.prove_deaths, self.connect, self.expect, self.finish, self.deliver, self.see_copies):
                action(most)
            for _ in range(8):
                self.reserve(most)
                self.finish(most)
                for i in range(len(self.live_prefills())):
                    self.step(lambda n, i=i: min(i, n - 1))  # type: ignore[misc]
                self.see_copies(most)
                self.verify_some(most)
                self.deliver(most)
            self.tick(lambda n: 1)
            self.check()
        self._check_idle()

    def _check_idle(self) -> None:
        d = self.decode()
        for job in self.jobs.values():
            need(job.on_decode in ("arrived", "lost", "gone"), f"request {job.key} is {job.on_decode} for ever")
            need(job.on_prefill in ("released", "gone"), f"request {job.key} is {job.on_prefill} on P for ever")
        need(not d.holds and not d.owned and len(d.free()) == D_PAGES - 1, "pages are lost on D")
        d.reader.check(idle=True)
        for p in self.live_prefills():
            need(not p.owned and not p.flights and len(p.free()) == P_PAGES - 1, "pages are lost on P")
            need(p.mapped <= {d.incarnation}, "a dead pool is still mapped")
            p.writer.check(idle=True)


ACTIONS: dict[str, int] = {  # name and weight
    "submit": 6, "reserve": 6, "expect": 6, "step": 12, "preempt": 2, "cancel_on_decode": 2, "cancel_on_prefill": 1,
    "finish": 3, "land_some": 5, "see_copies": 6, "verify_some": 5, "deliver": 14, "connect": 4, "disconnect": 2,
    "late_message": 4, "freeze": 1, "thaw": 2, "crash_prefill": 1, "crash_decode": 1, "prove_deaths": 2, "tick": 4,
}  # fmt: skip
