"""The prefill side alone, event by event: what it asks of engine, links and pools, and when."""

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch

from twostroke.engine.config import EngineOptions
from twostroke.engine.core import EngineCore
from twostroke.engine.request import Request, SamplingParams, SequenceKey, StepResult, Work
from twostroke.engine.sequence import State
from twostroke.errors import InvalidRequest, TwostrokeError
from twostroke.kernels.digest import fold_layers
from twostroke.kvtransfer import messages as kv
from twostroke.kvtransfer.transport import Done
from twostroke.services.handover.handover import PeerAddress
from twostroke.services.handover.pool_opener import Opened
from twostroke.services.handover.prefill import PrefillHandover
from twostroke.services.handover.wire_link import PoolOffer

from ..handover_rig import LAYERS, PAGE, VOCAB, TensorRunner, expected_tokens, random_prompt

DIGEST = b"12345678"
READER = 9
POOL = 5
PAGES = 33


class Links:
    """Collects what is sent."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, kv.FromWriter]] = []

    def attach(self, events: Any) -> None:
        self.events = events

    def send(self, batches: Mapping[int, Sequence[kv.FromWriter]]) -> None:
        self.sent += [(reader, message) for reader, messages in batches.items() for message in messages]

    def of(self, kind: type[Any]) -> list[Any]:
        return [message for _, message in self.sent if type(message) is kind]


class Transport:
    """Remembers copies; completes them at once, or, `later`, when the test says so."""

    kind = "test"

    def __init__(self) -> None:
        self.copies: list[tuple[int, tuple[int, ...], tuple[int, ...]]] = []
        self.closed = self.gone = False
        self.fails = False
        self.later = False
        self.started: list[tuple[kv.Copy, Done]] = []

    def start(self, copy: kv.Copy, done: Done) -> None:
        if self.fails:
            raise OSError("no")
        self.copies.append((copy.layer, copy.src, copy.dst))
        if self.later:
            self.started.append((copy, done))
        else:
            done(copy.copy, DIGEST * len(copy.src))

    def complete(self, count: int | None = None) -> None:
        """The host has seen the first `count` (all) of the started copies completed, on a thread of the transport's."""
        landed, self.started = self.started[:count], [] if count is None else self.started[count:]
        thread = threading.Thread(target=lambda: [done(c.copy, DIGEST * len(c.src)) for c, done in landed])
        thread.start()
        thread.join()

    def probe(self) -> float:
        return 1.0

    def peer_gone(self) -> None:
        self.gone = True

    def close(self) -> None:
        self.closed = True

    def pages(self, layer: int) -> list[int]:
        """Target pages written in a layer, in order."""
        return [page for at, _, dst in self.copies if at == layer for page in dst]


class Side:
    """Engine and hand-over on this thread; posted events run when `run_events` says so."""

    def __init__(self, **options: Any) -> None:
        self.pool = torch.zeros((LAYERS, PAGES, 2, 1, PAGE, 2), dtype=torch.int32)
        self.runner = TensorRunner(self.pool)
        self.core = EngineCore(
            self.runner,
            EngineOptions(page_size=PAGE, **{"watermark": 0.0, "token_budget": 64, **options}),
            pages=PAGES,
            context_length=512,
            vocab_size=VOCAB,
            eos_token_ids=frozenset(),
            cache_root=b"",
        )
        self.links, self.transport = Links(), Transport()
        self.now = 100.0
        self.handover = PrefillHandover(self.core, self.links, self.pool, clock=lambda: self.now)
        self.events: list[Callable[[], None]] = []
        self.emitted = StepResult()
        self.tokens: dict[SequenceKey, list[int]] = {}
        self.handover.attach(lambda event: self.events.append(event), self.emit)
        self.numbers = 0

    def emit(self, result: StepResult) -> None:
        self.emitted.outputs += result.outputs
        self.emitted.failures += result.failures

    def run_events(self) -> None:
        events, self.events = self.events, []
        for event in events:
            event()

    def up(self) -> None:
        self.handover.reader_up(READER, PoolOffer(POOL, 100, 64, b""), Opened(self.transport, 2.5))
        self.run_events()

    def submit(self, prompt: list[int], *, start_now: bool = True, **params: Any) -> SequenceKey:
        self.numbers += 1
        key = SequenceKey(1, self.numbers, 0, 0)
        sampling = SamplingParams(**{"temperature": 0.0, "max_tokens": 9, **params})
        request = Request(key, prompt, sampling, Work.PREFILL, start_now=start_now)
        self.core.add(request)
        self.handover.submitted(request, PeerAddress("d:1", READER))
        return key

    def say(self, message: kv.FromReader, *, run: bool = True) -> None:
        self.handover.received(READER, message)
        if run:
            self.run_events()

    def ticket(self, number: int, key: SequenceKey, pages: int, *, run: bool = True) -> tuple[int, ...]:
        """A ticket for so many pages; returns them."""
        ids = tuple(range(10 * number, 10 * number + pages))
        self.say(kv.Ticket(number, key, POOL, ids, 0, 60.0), run=run)
        return ids

    def step(self) -> StepResult:
        result = self.core.step(self.handover.hook, self.handover.wait)
        self.handover.stepped(result)
        for key, _ in result.failures:
            self.handover.gone(key)
        for output in result.outputs:
            self.tokens.setdefault(output.key, []).extend(token.token_id for token in output.tokens)
        return result

    def over(self) -> None:
        """Nothing is left."""
        self.core.check_integrity(idle=True)
        self.handover.writer.check(idle=True)
        self.handover.check(idle=True)
        assert not self.handover._prefills


@pytest.fixture
def side() -> Side:
    return Side()


def test_each_page_is_pushed_once_as_soon_as_it_is_full(side: Side) -> None:
    side.up()
    prompt = random_prompt(1, 70)
    key = side.submit(prompt)
    pages = side.ticket(1, key, 18)
    side.step()  # 64 of 70 tokens
    assert side.transport.pages(0) == side.transport.pages(LAYERS - 1) == list(pages[:16])
    assert side.links.of(kv.Progress)[-1] == kv.Progress(((1, LAYERS, 16),))
    side.step()
    assert side.transport.pages(1) == list(pages)
    (complete,) = side.links.of(kv.Complete)
    (first,) = complete.first_tokens
    assert (first.sample, first.token_id, first.finish) == (0, expected_tokens(prompt, 1)[0], 0)
    assert first.prefill > 0
    assert len(complete.digests) == 18 * 8
    assert side.core.state_of(key) is State.HELD
    side.say(kv.Accepted(1))
    assert side.core.state_of(key) is None
    side.over()


def test_a_finish_with_token_0_is_told(side: Side) -> None:
    side.up()
    prompt = random_prompt(2, 6)
    key = side.submit(prompt, stop_token_ids=tuple(expected_tokens(prompt, 1)))
    side.ticket(1, key, 2)
    side.step()
    assert side.links.of(kv.Complete)[0].first_tokens[0].finish == 1
    side.say(kv.Accepted(1))
    side.over()


def test_a_parked_request_starts_with_its_ticket(side: Side) -> None:
    side.up()
    key = side.submit([1, 2, 3], start_now=False)
    assert not side.step().progress
    side.ticket(1, key, 1)
    assert side.step().outputs
    side.say(kv.Accepted(1))
    side.over()


def test_a_ticket_in_the_middle_of_a_step_is_served_there_and_the_engine_learns_of_it_afterwards(side: Side) -> None:
    side.up()
    key = side.submit(random_prompt(3, 9))

    def between(layer: int, rows: Any) -> None:
        if layer == 1:
            side.ticket(1, key, 3, run=False)

    side.runner.after_layer = between
    result = side.core.step(side.handover.hook, side.handover.wait)
    assert [side.transport.pages(layer) for layer in range(LAYERS)] == [[10, 11, 12]] * LAYERS
    assert side.links.of(kv.Complete) == []
    side.handover.stepped(result)
    assert len(side.links.of(kv.Complete)) == 1
    side.run_events()  # the posted drain finds nothing
    side.say(kv.Accepted(1))
    side.over()


def test_a_ticket_for_a_sequence_outside_of_the_step_is_served_within_it(side: Side) -> None:
    side.up()
    first = side.submit([1, 2, 3])
    side.step()
    second = side.submit([4, 5, 6])
    side.runner.after_layer = lambda layer, rows: layer or side.ticket(1, first, 1, run=False)
    result = side.core.step(side.handover.hook, side.handover.wait)
    assert len(side.transport.copies) == LAYERS
    side.handover.stepped(result)
    assert len(side.links.of(kv.Complete)) == 1
    side.say(kv.Accepted(1))
    side.core.cancel(second)
    side.handover.gone(second)
    side.over()


def test_a_revoke_in_the_middle_of_a_step_stops_the_push(side: Side) -> None:
    side.up()
    key = side.submit(random_prompt(4, 9))
    side.ticket(1, key, 3)
    side.runner.after_layer = lambda layer, rows: layer == 1 and side.say(kv.Revoke(1), run=False)
    side.step()
    assert side.transport.pages(0) == [10, 11, 12]
    assert side.transport.pages(1) == side.transport.pages(2) == []
    assert side.links.of(kv.Drained) == [kv.Drained(1)]
    side.over()  # token 0 was sampled all the same, and with it the sequence ended
    assert side.tokens[key]


def test_a_preempted_sequence_is_pushed_from_its_new_pages() -> None:
    side = Side(unticketed_share=1.0)
    side.up()
    prompt = random_prompt(5, 100)
    first = side.submit(prompt)
    side.step()
    side.step()
    assert side.tokens[first] == expected_tokens(prompt, 1)
    second = side.submit(random_prompt(6, 60), start_now=False)
    side.ticket(1, second, 15)
    assert side.step().preempted == [first]
    side.transport.copies.clear()
    side.say(kv.Ticket(2, first, POOL, tuple(range(50, 75)), 0, 60.0))
    assert side.transport.copies == []  # nothing of it is there
    side.say(kv.Accepted(1))
    while len(side.links.of(kv.Complete)) != 2:
        assert side.step().progress
    assert side.transport.pages(0) == list(range(50, 75))
    assert side.tokens[first] == expected_tokens(prompt, 1)  # once
    assert side.links.of(kv.Complete)[1].first_tokens[0].token_id == side.tokens[first][0]
    side.say(kv.Accepted(2))
    side.over()


def test_a_ticket_for_a_sequence_that_lost_its_pages_by_the_very_step_waits_for_its_end() -> None:
    side = Side(unticketed_share=1.0)
    side.up()
    first = side.submit(random_prompt(5, 100))
    side.step()
    side.step()
    second = side.submit(random_prompt(6, 60), start_now=False)
    side.ticket(1, second, 15)

    def between(layer: int, rows: Any) -> None:
        if layer == 0:
            side.say(kv.Ticket(2, first, POOL, tuple(range(50, 75)), 0, 60.0), run=False)

    side.runner.after_layer = between
    assert side.step().preempted == [first]
    side.runner.after_layer = lambda layer, rows: None
    side.say(kv.Accepted(1))
    assert side.transport.pages(0) == list(range(10, 25))  # nothing of the other is there any more
    while len(side.links.of(kv.Complete)) != 2:
        assert side.step().progress
    assert side.transport.pages(0) == [*range(10, 25), *range(50, 75)]
    side.say(kv.Accepted(2))
    side.over()


def test_a_cancelled_sequence_drains_its_ticket(side: Side) -> None:
    side.up()
    key = side.submit(random_prompt(7, 70))
    side.ticket(1, key, 18)
    side.step()
    side.core.cancel(key)
    side.handover.gone(key)
    side.handover.gone(key)
    (drained,) = side.links.of(kv.Drained)
    assert drained.reason
    side.over()


def test_a_dead_reader_costs_its_pool_and_frees_its_sequences(side: Side) -> None:
    side.up()
    key = side.submit([1, 2, 3])
    side.ticket(1, key, 1)
    side.step()
    side.handover.reader_down(READER)
    side.run_events()
    assert not side.transport.closed
    side.handover.reader_dead(READER)
    side.run_events()
    assert side.transport.closed
    assert side.core.state_of(key) is None
    side.over()


def test_a_link_that_stands_after_its_reader_was_proven_dead_leaves_no_pool_open(side: Side) -> None:
    side.up()
    side.handover.reader_dead(READER)
    side.run_events()
    side.transport.closed = False
    side.up()
    assert side.transport.closed
    side.over()


def test_a_reader_may_die_within_a_step(side: Side) -> None:
    side.up()
    key = side.submit(random_prompt(8, 9))
    side.ticket(1, key, 3)
    side.runner.after_layer = lambda layer, rows: layer == 1 and side.handover.reader_dead(READER)
    side.step()
    assert side.transport.closed
    assert side.transport.pages(1) == []
    side.over()


def test_a_failed_copy_is_told_as_digests_that_match_nothing(side: Side) -> None:
    side.up()
    key = side.submit([1, 2, 3])
    side.ticket(1, key, 1)
    side.transport.fails = True
    side.step()
    (complete,) = side.links.of(kv.Complete)
    assert complete.digests == bytes(8)
    side.transport.fails = False
    side.say(kv.Resend(1, (0,), complete.round))
    assert side.links.of(kv.Complete)[-1].digests != complete.digests
    side.say(kv.Accepted(1))
    side.over()


def test_a_fault_of_ours_within_the_hook_costs_one_sequence(side: Side, monkeypatch: pytest.MonkeyPatch) -> None:
    side.up()
    bad, good = side.submit([1, 2, 3]), side.submit([4, 5, 6])
    side.ticket(1, bad, 1)
    side.ticket(2, good, 1)
    original = side.handover.writer.pages_ready

    def pages_ready(key: Any, *rest: Any) -> Any:
        if key == bad:
            raise RuntimeError("a fault")
        return original(key, *rest)

    monkeypatch.setattr(side.handover.writer, "pages_ready", pages_ready)
    side.step()
    assert [(key, type(error)) for key, error in side.emitted.failures] == [(bad, TwostrokeError)]
    assert [message.ticket for message in side.links.of(kv.Drained)] == [1]
    assert [message.ticket for message in side.links.of(kv.Complete)] == [2]
    side.say(kv.Accepted(2))
    side.over()


def test_a_step_that_fails_completes_nothing(side: Side) -> None:
    side.up()
    key = side.submit([1, 2, 3])
    side.ticket(1, key, 1)
    side.runner.fail_with = RuntimeError("no")
    side.step()
    assert side.links.of(kv.Complete) == []
    assert len(side.links.of(kv.Drained)) == 1
    side.over()


def test_unanswered_completes_are_repeated(side: Side) -> None:
    side.up()
    key = side.submit([1, 2, 3])
    side.ticket(1, key, 1)
    side.step()
    side.now += 1.5
    side.handover.tick(side.now)
    assert len(side.links.of(kv.Complete)) == 2
    side.say(kv.Accepted(1))
    side.over()


def test_a_request_without_a_peer_is_refused(side: Side) -> None:
    request = Request(SequenceKey(1, 1, 0, 0), [1], SamplingParams(), Work.PREFILL)
    side.core.add(request)
    side.handover.submitted(request, None)
    ((_, error),) = side.emitted.failures
    assert isinstance(error, InvalidRequest)
    side.over()


def test_whole_requests_are_none_of_its_business(side: Side) -> None:
    request = Request(SequenceKey(1, 1, 0, 0), [1], SamplingParams(max_tokens=1), Work.ALL)
    side.core.add(request)
    side.handover.submitted(request, None)
    side.step()
    side.handover.gone(request.key)
    assert side.links.sent == []
    side.over()


def test_close_lets_go_of_all_pools(side: Side) -> None:
    side.up()
    side.handover.close()
    assert side.transport.closed


def test_copies_that_complete_later_hold_their_pages() -> None:
    """Complete is not said before, a cancelled sequence's pages are not free before."""
    side = Side()
    side.transport.later = True
    side.up()
    key = side.submit(random_prompt(1, 40))
    side.ticket(1, key, 10)
    side.step()
    assert len(side.transport.started) == LAYERS
    assert not side.links.of(kv.Complete)
    side.transport.complete(1)
    side.run_events()
    assert not side.links.of(kv.Complete)
    assert [name[0] for name in side.core.pool.holds()] == ["copy"]  # one for all layers
    side.core.abandon(key)
    side.handover.gone(key)
    assert not side.links.of(kv.Drained)
    assert side.core.pool.free_pages < PAGES - 1
    side.core.check_integrity()
    side.transport.complete()
    side.run_events()
    assert [drained.ticket for drained in side.links.of(kv.Drained)] == [1]
    assert not side.core.pool.holds()


def test_copies_that_complete_later_complete_the_ticket() -> None:
    side = Side()
    side.transport.later = True
    side.up()
    key = side.submit(random_prompt(1, 40))
    side.ticket(1, key, 10)
    side.step()
    side.transport.complete()
    side.run_events()
    [complete] = side.links.of(kv.Complete)
    assert complete.digests == fold_layers(DIGEST * 10 * LAYERS, 10)
    side.say(kv.Accepted(1))
    side.handover.check(idle=True)
    assert not side.core.pool.holds()


def test_it_stays_awake_once_the_last_layers_but_one_have_been_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    side, awake = Side(), list[int]()
    monkeypatch.setattr(side.handover._inbox, "stay_awake", lambda: awake.append(1))
    side.transport.later = True
    side.up()
    key = side.submit(random_prompt(1, 8))
    side.ticket(1, key, 2)
    side.step()
    assert [copy.layer for copy, _ in side.transport.started] == list(range(LAYERS))
    side.transport.complete(LAYERS - 2)
    side.run_events()
    assert awake == []
    side.handover._inbox.within_step()  # of the next one
    side.transport.complete(1)
    side.run_events()
    assert awake == [1]
    side.handover._inbox.step_ended()
    side.transport.complete()
    side.run_events()
    assert awake == [1]
    side.say(kv.Accepted(1))
    side.handover.check(idle=True)
