"""Histories of a prefill worker whose steps overlap: everything that may happen to it, at any point of a step.

The device computes as late as it may, copies land later still. What is complete must hold the prompt's KV.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from twostroke.engine.batch import Launched, LayerHook, Row
from twostroke.engine.request import SequenceKey, Token
from twostroke.kernels.digest import fold_layers, pool_digests
from twostroke.kvtransfer import messages as kv
from twostroke.kvtransfer.pool_pages import pool_bytes
from twostroke.kvtransfer.transport import Done
from twostroke.services.handover.wire_link import PoolOffer

from ..handover_rig import LAYERS, PAGE, VOCAB, TensorRunner, expected_tokens, random_prompt
from .test_prefill import PAGES, POOL, READER, Side

ANY = st.integers(0, 1 << 16)
PEER_PAGES = 4096


class LazyStep:
    """A step on its way; its own event."""

    def __init__(self, runner: "LazyRunner", rows: list[Row]) -> None:
        self.event = self
        self.rows = rows
        self.result: list[Token] | None = None
        self._runner = runner

    def query(self) -> bool:
        return self.result is not None

    def synchronize(self) -> None:
        self._runner.compute(self)

    def tokens(self) -> list[Token]:
        self._runner.compute(self)
        assert self.result is not None
        return self.result


class LazyRunner(TensorRunner):
    """Computes a step when it is waited for, or when a copy that lands wants its layers."""

    overlaps = True

    def __init__(self, pool: torch.Tensor) -> None:
        super().__init__(pool)
        self.on_the_way: list[LazyStep] = []
        self.launched = 0
        self.between: list[tuple[int, Callable[[], None]]] = []  # layer, and what happens before its hook

    def launch(self, rows: list[Row], hook: LayerHook | None) -> Launched:
        step = LazyStep(self, [replace(row, token_ids=list(row.token_ids), pages=list(row.pages)) for row in rows])
        self.on_the_way.append(step)
        self.launched += 1
        assert len(self.on_the_way) <= 2
        progress = [row.progress for row in rows if row.progress is not None]
        for layer in range(LAYERS):
            now = [happens for at, happens in self.between if at == layer]
            self.between = [entry for entry in self.between if entry[0] != layer]
            for happens in now:
                happens()
            if hook is not None:
                hook(layer, progress)
        return step

    def compute(self, until: LazyStep | None = None) -> None:
        while self.on_the_way and (until is None or until.result is None):
            step = self.on_the_way.pop(0)
            step.result = self.run(step.rows, None)


class LandingTransport:
    """Copies, for real, when the test says so."""

    kind = "test"

    def __init__(self, runner: LazyRunner, target: torch.Tensor) -> None:
        self.runner, self.target = runner, target
        self.started: list[tuple[kv.Copy, Done, int]] = []

    def start(self, copy: kv.Copy, done: Done) -> None:
        self.started.append((copy, done, self.runner.launched))

    def land(self, count: int) -> None:
        landed, self.started = self.started[:count], self.started[count:]
        if any(mark > self.runner.launched - len(self.runner.on_the_way) for _, _, mark in landed):
            self.runner.compute()
        told = []
        for copy, done, _ in landed:
            self.target[copy.layer, list(copy.dst)] = self.runner.pool[copy.layer, list(copy.src)]
            digests = pool_digests(
                pool_bytes(self.runner.pool)[copy.layer : copy.layer + 1], copy.src, ticket=copy.ticket,
                first_layer=copy.layer, ordinal=copy.ordinal,
            )  # fmt: skip
            told.append((done, copy.copy, digests))
        thread = threading.Thread(target=lambda: [done(number, digests) for done, number, digests in told])
        thread.start()
        thread.join()

    def probe(self) -> float:
        return 1.0

    def close(self) -> None:
        assert not self.started


@dataclass
class Asked:
    """A request."""

    prompt: list[int]
    ticket: int = 0
    pages: tuple[int, ...] = ()
    dropped: bool = False  # cancelled
    void: bool = False  # its ticket was revoked or has expired
    answered: bool = False


class OverlapHistory(RuleBasedStateMachine):
    """Submits, tickets, steps, landings, cancels, revokes, expiries, broken links."""

    @initialize(
        budget=st.sampled_from([8, 20, 64]), share=st.sampled_from([1.0, 1.0, 0.5]), caching=st.booleans(),
        batch=st.integers(1, 6),
    )  # fmt: skip
    def start(self, budget: int, share: float, caching: bool, batch: int) -> None:
        self.side = Side(token_budget=budget, unticketed_share=share, prefix_cache=caching, max_batch=batch)
        self.side.runner = self.runner = LazyRunner(self.side.pool)
        self.side.core._runner = self.side.core._postprocessor._runner = self.runner
        self.target = torch.full((LAYERS, PEER_PAGES, *self.side.pool.shape[2:]), -1, dtype=torch.int32)
        self.transport = LandingTransport(self.runner, self.target)
        self.asked: dict[SequenceKey, Asked] = {}
        self.tickets = 0
        self.heard = 0  # messages
        self.up()

    def up(self) -> None:
        from twostroke.services.handover.pool_opener import Opened

        offer = PoolOffer(POOL, PEER_PAGES, 64, b"")
        self.side.handover.reader_up(READER, offer, Opened(self.transport, 1.0))
        self.side.run_events()

    def pick(self, number: int, want: Callable[[SequenceKey, Asked], bool]) -> SequenceKey | None:
        fitting = [key for key, asked in self.asked.items() if want(key, asked)]
        return fitting[number % len(fitting)] if fitting else None

    def happen(self, within: int, what: Callable[[], None]) -> None:
        """Now, or in the middle of the next step that is launched."""
        if within < LAYERS:
            self.runner.between.append((within, what))
        else:
            what()
            self.side.run_events()

    @rule(
        prompts=st.lists(
            st.tuples(
                st.one_of(st.integers(1, 12), st.integers(30, 110)),
                st.sampled_from([1.0, 1.0, 0.0]),  # of `start_now`
                st.integers(0, 3),  # common beginnings
                st.integers(-LAYERS - 2, LAYERS + 1),  # when its ticket comes: below 0, later or never
            ),
            min_size=1,
            max_size=5,
        )
    )
    def submit(self, prompts: list[tuple[int, float, int, int]]) -> None:
        for length, now, like, within in prompts:
            prompt = random_prompt(like, length)
            key = self.side.submit(prompt, start_now=bool(now))
            self.asked[key] = Asked(prompt)
            if within >= 0:
                self.give_ticket(key, within)

    def give_ticket(self, key: SequenceKey, within: int) -> None:
        asked, self.tickets = self.asked[key], self.tickets + 1
        count = -(-len(asked.prompt) // PAGE)
        first = 1 + 30 * (self.tickets % 130)  # long ago somebody else's
        asked.ticket, asked.pages = self.tickets, tuple(range(first, first + count))
        message = kv.Ticket(asked.ticket, key, POOL, asked.pages, 0, 60.0)
        self.happen(within, lambda: self.side.say(message, run=False))

    @rule(number=ANY, within=st.integers(0, 2 * LAYERS))
    def ticket(self, number: int, within: int) -> None:
        if (key := self.pick(number, lambda key, asked: not asked.ticket and not asked.dropped)) is not None:
            self.give_ticket(key, within)

    @rule(
        first=st.integers(80, 120), second=st.integers(60, 120), steps=st.integers(0, 14), within=st.integers(0, LAYERS)
    )
    def squeeze(self, first: int, second: int, steps: int, within: int) -> None:
        """One with a ticket wants the room of one that has none yet; whose ticket comes in that very step."""
        loser = self.side.submit(random_prompt(9, first))
        self.asked[loser] = Asked(random_prompt(9, first))
        self.run_steps(steps, 0)
        winner = self.side.submit(random_prompt(8, second), start_now=False)
        self.asked[winner] = Asked(random_prompt(8, second))
        self.give_ticket(winner, LAYERS)
        self.give_ticket(loser, within)
        self.run_steps(1, 0)

    @rule(count=st.integers(1, 6), landing=st.integers(0, 8))
    def step(self, count: int, landing: int) -> None:
        self.run_steps(count, landing)

    def run_steps(self, count: int, landing: int) -> None:
        for _ in range(count):
            self.side.step()
            if landing:
                self.transport.land(landing)
            self.listen()

    @rule(count=st.integers(1, 12), within=st.integers(0, 2 * LAYERS))
    def land(self, count: int, within: int) -> None:
        self.happen(within, lambda: self.transport.land(count))
        self.listen()

    @rule(number=ANY)
    def cancel(self, number: int) -> None:
        key = self.pick(number, lambda key, asked: not asked.dropped)
        if key is not None:
            self.drop(key)
            self.listen()

    def drop(self, key: SequenceKey) -> None:
        self.asked[key].dropped = True
        self.side.core.cancel(key)
        self.side.handover.gone(key)

    @rule(number=ANY, within=st.integers(0, 2 * LAYERS))
    def revoke(self, number: int, within: int) -> None:
        key = self.pick(number, lambda key, asked: bool(asked.ticket))
        if key is not None:
            self.asked[key].void = True
            message = kv.Revoke(self.asked[key].ticket)
            self.happen(within, lambda: self.side.say(message, run=False))

    @precondition(lambda self: self.tickets and self.tickets % 3 == 0)
    @rule(seconds=st.sampled_from([0.5, 1.5, 61.0]))
    def time_passes(self, seconds: float) -> None:
        self.side.now += seconds
        for asked in self.asked.values():
            asked.void |= seconds > 60
        self.side.handover.tick(self.side.now)
        self.listen()

    @rule()
    def the_link_breaks(self) -> None:
        self.side.handover.reader_down(READER)
        self.up()
        self.listen()

    def listen(self) -> None:
        """Takes what was said; what is complete is checked and accepted."""
        self.side.run_events()
        sent, self.heard = self.side.links.sent[self.heard :], len(self.side.links.sent)
        for _, message in sent:
            if isinstance(message, kv.Complete):
                asked = next(asked for asked in self.asked.values() if asked.ticket == message.ticket)
                asked.answered = True
                self.check(asked, message)
                self.side.say(kv.Accepted(message.ticket))
                self.heard = min(self.heard, len(self.side.links.sent))
        self.side.core.check_integrity()
        self.side.handover.writer.check(idle=False)

    def check(self, asked: Asked, complete: kv.Complete) -> None:
        """The pages hold the prompt's KV, and their digests are those that were sent."""
        slots = self.target[:, list(asked.pages)]  # [layers, n, 2, 1, PAGE, 2]
        count = len(asked.prompt)
        tokens = slots[:, :, 0, 0, :, 0].flatten(1)[:, :count] - VOCAB * torch.arange(LAYERS)[:, None]
        positions = slots[:, :, 1, 0, :, 1].flatten(1)[:, :count]
        assert (tokens == torch.tensor(asked.prompt)).all()
        assert (positions == torch.arange(count)).all()
        own = pool_digests(
            pool_bytes(self.target), asked.pages, ticket=asked.ticket, first_layer=0, ordinal=0
        )  # fmt: skip
        assert complete.digests == fold_layers(own, len(asked.pages))
        assert [first.token_id for first in complete.first_tokens] == expected_tokens(asked.prompt, 1)

    def settle(self) -> None:
        """Until nothing happens by itself."""
        self.listen()
        for _ in range(4000):
            progress = self.side.step().progress
            self.listen()
            if self.transport.started:
                self.transport.land(1 << 30)
                self.listen()
            elif not progress:
                return
        raise AssertionError("it does not come to rest")

    def teardown(self) -> None:
        if not hasattr(self, "side"):
            return
        between, self.runner.between = self.runner.between, []
        for _, happens in between:
            happens()
        self.settle()
        for key, asked in self.asked.items():
            assert asked.answered or asked.dropped or asked.void or not asked.ticket, "a ticket that nobody serves"
            if self.side.core.state_of(key) is not None and (asked.void or not asked.ticket):
                self.drop(key)
        self.settle()
        left = {key: self.side.core.state_of(key) for key in self.asked}
        assert not any(left.values()), left
        self.side.core.check_integrity(idle=True)
        assert self.side.core.pool.free_pages == PAGES - 1
        assert not self.side.core.pool.holds()
        self.side.handover.writer.check(idle=not self.side.handover.writer.open_tickets())
        self.side.handover.close()


OverlapHistory.TestCase.settings = settings(
    max_examples=80, stateful_step_count=30, deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)  # fmt: skip
TestOverlapHistory: Any = OverlapHistory.TestCase
