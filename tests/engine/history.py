"""Histories of an engine: everything that a driver and a hand-over may do to it, in any order, with what must hold."""

from collections.abc import Callable
from inspect import signature
from random import Random
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from twostroke.engine.request import SequenceKey, StepResult, Token, Work
from twostroke.engine.sequence import State
from twostroke.errors import InvalidRequest

from .fake_engine import FakeEngine

WRITERS = (5, 6)
LETTERS = 3  # distinct tokens at the branches of prompts: many common beginnings
ANY = st.integers(0, 1 << 16)
GARBAGE = 995


class History(RuleBasedStateMachine):
    """All that a driver and a hand-over may do to an engine."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0
        self.gone: set[SequenceKey] = set()  # ended by us or by a planted failure of a step
        self.lost: set[SequenceKey] = set()  # gone while in transit: their writers may still write
        self.ticketed: set[SequenceKey] = set()

    @initialize(
        pages=st.integers(6, 26),
        page_size=st.integers(1, 4),
        max_batch=st.integers(1, 6),
        budget=st.integers(1, 24),
        small_budget=st.integers(1, 8),
        reserve=st.sampled_from(["prompt", "expected", "max"]),
        watermark=st.sampled_from([0.0, 0.01, 0.2]),
        share=st.sampled_from([0.3, 0.5, 1.0]),
        caching=st.sampled_from([True, True, True, False]),
        eos=st.sampled_from([frozenset(), frozenset(range(0, 997, 9))]),
        context=st.sampled_from([30, 500]),
        lazy=st.booleans(),
    )
    def start(
        self,
        pages: int,
        page_size: int,
        max_batch: int,
        budget: int,
        small_budget: int,
        reserve: str,
        watermark: float,
        share: float,
        caching: bool,
        eos: frozenset[int],
        context: int,
        lazy: bool,
    ) -> None:
        self.engine = FakeEngine(
            pages=pages,
            context=context,
            eos=eos,
            page_size=page_size,
            max_batch=max_batch,
            token_budget=budget,
            decode_prefill_budget=small_budget,
            reserve=reserve,
            watermark=watermark,
            unticketed_share=share,
            prefix_cache=caching,
            lazy=lazy,
        )

    @rule(
        work=st.sampled_from(list(Work)),
        branches=st.lists(st.integers(0, LETTERS - 1), min_size=1, max_size=3),
        length=ANY,
        max_tokens=ANY,
        replayed=st.sampled_from([0, 0, 0, 1, 5]),
        start_now=st.booleans(),
        writer=st.sampled_from(WRITERS),
        salt=st.sampled_from([b"", b"", b"x"]),
        patience=st.sampled_from([None, None, 3.0]),
        samples=st.sampled_from([1, 1, 2, 3]),
        priority=st.sampled_from([0, 0, 0, -1, 2]),
    )
    def add(
        self,
        work: Work,
        branches: list[int],
        length: int,
        max_tokens: int,
        replayed: int,
        start_now: bool,
        writer: int,
        salt: bytes,
        patience: float | None,
        samples: int,
        priority: int,
    ) -> None:
        slots = self.engine.core.pool.usable * self.engine.options.page_size  # a few will not fit
        prompt = [branches[min(at // 6, len(branches) - 1)] for at in range(1 + length % max(2, slots * 2 // 3))]
        max_tokens = 1 + max_tokens % max(2, slots // 2)
        self.number += 1
        self.engine.clock.now += 0.1
        before = self.engine.core.load()
        try:
            self.engine.add(
                self.number,
                prompt,
                work,
                max_tokens=max_tokens,
                output_ids=[7] * replayed,
                start_now=start_now,
                writer=writer,
                cache_salt=salt,
                deadline=None if patience is None else self.engine.clock.now + patience,
                samples=1 if replayed else samples,
                priority=priority,
            )
        except InvalidRequest:
            assert self.engine.core.load() == before
        self.check()

    @rule(count=st.integers(1, 12))
    def step(self, count: int) -> None:
        for _ in range(count):
            ready = self.engine.core.has_work()
            result = self.one_step()
            assert ready or not result.progress, "an engine without work made progress"
            if not result.progress:
                assert not self.one_step().progress, "nothing changed from outside, but now there is progress"
                break

    def one_step(self) -> StepResult:
        secure = self.ticketed | set(self.carriers(State.AWAITING))
        result = self.engine.step()
        assert secure.isdisjoint(result.preempted), "pages under a ticket were taken"
        self.note_failures()
        self.check()
        return result

    def note_failures(self) -> None:
        assert all("planted" in str(error) for error in self.engine.failed.values()), self.engine.failed
        self.gone |= self.engine.failed.keys()

    @rule()
    def fail(self) -> None:
        self.engine.runner.fail_with = RuntimeError("planted")
        self.one_step()
        self.engine.runner.fail_with = None

    @rule()
    def fail_to_copy(self) -> None:
        self.engine.runner.fail_copies_with = RuntimeError("planted")
        self.one_step()
        self.engine.runner.fail_copies_with = None

    @rule(which=ANY)
    def cancel(self, which: int) -> None:
        if keys := self.keys():
            self.drop(keys[which % len(keys)])

    @rule(which=ANY)
    def cancel_in_transit(self, which: int) -> None:
        if keys := self.keys(State.AWAITING):
            self.drop(keys[which % len(keys)])

    def drop(self, key: SequenceKey) -> None:
        core, carrier = self.engine.core, self.engine.core.carrier(key)
        transit = core.state_of(key) is State.AWAITING
        free = core.pool.free_pages
        assert core.cancel(key)
        assert not core.cancel(key)
        assert core.pool.free_pages >= free
        if transit and carrier is not None and core.state_of(carrier) is None:
            self.lost.add(carrier)
        self.gone.add(key)
        self.check()

    @rule(which=ANY)
    def abandon(self, which: int) -> None:
        if carriers := self.carriers():
            carrier = carriers[which % len(carriers)]
            if self.engine.core.state_of(carrier) is State.AWAITING:
                self.lost.add(carrier)
            dropped = self.engine.core.abandon(carrier)
            assert dropped
            assert self.gone.isdisjoint(dropped)
            self.gone.update(dropped)
            assert self.engine.core.state_of(carrier) is None
            self.check()

    @rule(elapsed=st.sampled_from([0.5, 2.0]))
    def expire(self, elapsed: float) -> None:
        self.engine.clock.now += elapsed
        transit = self.carriers(State.AWAITING)
        expired = [key for key, _ in self.engine.core.expire(self.engine.clock.now)]
        assert self.gone.isdisjoint(expired)
        self.gone.update(expired)
        self.lost |= {carrier for carrier in transit if self.engine.core.state_of(carrier) is None}
        self.check()

    @rule(which=ANY)
    def ticket(self, which: int) -> None:
        if keys := [key for key in self.carriers() if self.engine.requests[key].work is Work.PREFILL]:
            key = keys[which % len(keys)]
            self.engine.core.ticketed(key)
            self.ticketed.add(key)
            self.check()

    @rule(which=ANY, early=st.booleans())
    def release(self, which: int, early: bool) -> None:
        keys = self.carriers(State.HELD)
        if early:
            keys = [key for key in self.carriers() if self.engine.requests[key].work is Work.PREFILL]
        if keys:
            self.engine.core.release(keys[which % len(keys)])
            self.check()

    @rule(which=ANY, held_longer=st.booleans())
    def arrive(self, which: int, held_longer: bool) -> None:
        if keys := self.carriers(State.AWAITING):
            key = keys[which % len(keys)]
            wanted = [each for each in self.engine.samples(key) if each not in self.gone]
            if held_longer:
                self.engine.write_kv(key)
                outputs = self.engine.core.samples_arrived(key, self.engine.first_tokens(key))
                assert [output.key for output in outputs] == wanted
                for output in outputs:
                    self.engine.take(output)
                self.check()
                assert self.engine.core.pool.unhold(("ticket", key))
            else:
                assert self.engine.arrive(key) is not None
            assert not self.engine.core.samples_arrived(key, {key: (Token(1), None)}), "a second time"
            self.check()

    @rule(which=ANY)
    def write_in_transit(self, which: int) -> None:
        if keys := self.carriers(State.AWAITING):
            self.scribble(keys[which % len(keys)])

    @rule(which=ANY, done=st.booleans())
    def write_late(self, which: int, done: bool) -> None:
        if not self.lost:
            return
        key = sorted(self.lost)[which % len(self.lost)]
        self.scribble(key)
        if done:
            self.lost.remove(key)
            assert self.engine.core.pool.unhold(("ticket", key))
        self.check()

    def scribble(self, key: SequenceKey) -> None:
        """A writer that has not proven that it stopped may write whenever it likes."""
        pages = self.engine.reserved[key].pages
        self.engine.runner.fill(pages, [GARBAGE] * (len(pages) * self.engine.options.page_size))

    def keys(self, state: State | None = None) -> list[SequenceKey]:
        """Samples that are wanted."""
        found = [(key, self.engine.core.state_of(key)) for key in self.engine.requests if key not in self.gone]
        return [key for key, now in found if now is not None and state in (None, now)]

    def carriers(self, state: State | None = None) -> list[SequenceKey]:
        """Names of live sequences, each of which may carry several samples."""
        found = [self.engine.core.carrier(key) for key in self.keys(state)]
        return [key for key in dict.fromkeys(found) if key is not None]

    def check(self) -> None:
        self.engine.core.check_integrity()
        for key in self.carriers(State.HELD):
            pages = next(row.pages for _, row in reversed(self.engine.progress) if row.key == key)
            known = self.engine.known(key)
            assert self.engine.runner.read(pages, len(known)) == known, "the KV that waits to be fetched is another's"

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        for _ in range(6 * self.number + 2):  # each round at least one sequence must end
            self.engine.drain()
            self.note_failures()
            keys = self.keys()
            if not keys and not self.lost:
                break
            for key in self.carriers():
                self.engine.core.ticketed(key)
            for key in self.carriers(State.AWAITING):
                self.engine.arrive(key)
            for key in self.carriers(State.HELD):
                self.engine.core.release(key)
            for key in self.lost:
                self.scribble(key)
                self.engine.core.pool.unhold(("ticket", key))
            self.lost.clear()
        self.engine.core.check_integrity(idle=True)
        assert not self.engine.core.has_work()
        self.engine.check_outputs()
        for key, request in self.engine.requests.items():
            if key not in self.gone:
                whole = key in self.engine.ends or request.work is Work.PREFILL
                assert whole, f"{key} got lost"
                assert self.engine.outputs[key] == self.engine.expected(key)


EVENTS: dict[Callable[..., None], int] = {  # and how often, relatively
    History.add: 30,
    History.step: 40,
    History.arrive: 12,
    History.ticket: 6,
    History.release: 6,
    History.cancel: 3,
    History.cancel_in_transit: 2,
    History.write_in_transit: 2,
    History.write_late: 4,
    History.expire: 2,
    History.fail: 1,
    History.fail_to_copy: 1,
    History.abandon: 1,
}


class Walk:
    """A long history by a seeded random walk: deeper than generated ones, which can be shrunk instead."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)
        self.history = History()

    def run(self, events: int) -> None:
        draw, choose = self._random.randint, self._random.choice
        self.history.start(
            pages=draw(6, 26),
            page_size=draw(1, 4),
            max_batch=draw(1, 6),
            budget=draw(1, 24),
            small_budget=draw(1, 8),
            reserve=choose(["prompt", "expected", "max"]),
            watermark=choose([0.0, 0.01, 0.2]),
            share=choose([0.3, 0.5, 1.0]),
            caching=choose([True, True, True, False]),
            eos=choose([frozenset(), frozenset(range(0, 997, 9))]),
            context=choose([30, 500]),
            lazy=choose([False, True]),
        )
        self._works = choose([list(Work), [Work.ALL], [Work.PREFILL], [Work.DECODE], [Work.PREFILL, Work.ALL]])
        for event in self._random.choices(list(EVENTS), list(EVENTS.values()), k=events):
            if event is not History.add or len(self.history.keys()) < 20:
                event(self.history, **self._arguments(event))
        self.history.teardown()

    def _arguments(self, event: Callable[..., None]) -> dict[str, Any]:
        draw, choose = self._random.randint, self._random.choice
        arguments = {
            "work": choose(self._works),
            "branches": [draw(0, LETTERS - 1) for _ in range(draw(1, 3))],
            "length": draw(0, 1 << 16),
            "max_tokens": draw(0, 1 << 16),
            "replayed": choose([0, 0, 0, 1, 5]),
            "start_now": choose([False, True]),
            "writer": choose(WRITERS),
            "salt": choose([b"", b"", b"x"]),
            "patience": choose([None, None, 3.0]),
            "samples": choose([1, 1, 2, 3]),
            "count": draw(1, 4),
            "elapsed": choose([0.5, 2.0]),
            "which": draw(0, 1 << 16),
            "early": choose([False, False, True]),
            "held_longer": choose([False, True]),
            "done": choose([False, True]),
            "priority": choose([0, 0, 0, -1, 2]),
        }
        return {name: arguments[name] for name in list(signature(event).parameters)[1:]}
