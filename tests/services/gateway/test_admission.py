"""Admission: places and tokens with an end, tenants' limits, who gives way, and books that are whole afterwards."""

import asyncio
from contextlib import ExitStack
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from twostroke.errors import DeadlineExceeded, InvalidRequest, Overloaded, Unavailable
from twostroke.services.gateway.admission import MAX_TENANTS, OTHERS, Admission
from twostroke.services.gateway.ledger import Cost, LocalLedger
from twostroke.services.gateway.place import TOLD_AT_ONCE, Place
from twostroke.services.security.limits import Limits
from twostroke.services.security.tenant import ANYONE, Tenant


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def ns(self) -> int:
        return round(self.now * 1e9)


def admission(places: int = 100, tokens: int = 0, clock: Clock | None = None) -> Admission:
    clock = clock or Clock()
    return Admission(places, LocalLedger(clock.ns), max_tokens=lambda: tokens, clock=clock, draw=lambda: 0.0)


def refused(doing: object) -> Overloaded:
    with pytest.raises(Overloaded) as caught:
        doing()  # type: ignore[operator]
    assert caught.value.retry_after_s is not None
    assert 0.1 <= caught.value.retry_after_s <= 60 or "a minute" in caught.value.message
    return caught.value


async def test_refuses_over_the_limit_at_once_and_says_when_to_come_back() -> None:
    it = Admission(2)
    with it.slot(), it.slot():
        refused(it.slot().__enter__)
        assert it.inside == 2
    assert it.inside == 0
    assert it.refusals == {("queue_places", ""): 1}


async def test_a_place_is_freed_however_its_owner_ends() -> None:
    it = Admission(1)
    with pytest.raises(ValueError, match="x"), it.slot():
        raise ValueError("x")
    with pytest.raises(asyncio.CancelledError), it.slot():
        raise asyncio.CancelledError
    with it.slot():
        assert it.inside == 1


async def test_idle_waits_for_the_last_one() -> None:
    it = Admission(3)
    await it.idle()
    with it.slot():
        with it.slot():
            waiting = asyncio.create_task(it.idle())
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not waiting.done()
    await waiting


async def test_closed_admits_nobody_but_lets_those_inside_end() -> None:
    it = Admission(3)
    with it.slot():
        assert it.is_open
        it.close()
        assert not it.is_open
        with pytest.raises(Unavailable), it.slot():
            pass
        assert it.inside == 1
    await it.idle()


async def test_tokens_are_charged_and_uncharged_as_they_are_computed() -> None:
    it = admission(tokens=1000)
    with it.slot(2) as place:
        place.expect(300, 50)
        assert it.queue.tokens == 400
        refused(lambda: _expect(it, 500, 101))
        place.took(0, 1)
        assert it.queue.tokens == 99  # the prompt is computed
        place.took(1, TOLD_AT_ONCE - 6)
        assert it.queue.tokens == 99  # a few are not told
        place.took(1, 6)
        place.took(0, 70)  # more than was expected
        assert it.queue.tokens == 50 - TOLD_AT_ONCE
        place.took(1, 50 - 2 * TOLD_AT_ONCE)
        place.took(1, TOLD_AT_ONCE)  # all that was expected
        assert it.queue.tokens == 0
        place.ended(1)
        assert it.queue.tokens == 0
        with it.slot() as other:
            other.expect(950, 100)  # 50 of which are expected, by what was seen
            assert it.queue.tokens == 1000
    assert it.queue.tokens == it.queue.places == 0


def _expect(it: Admission, prompt: int, output: int) -> None:
    with it.slot() as place:
        place.expect(prompt, output)


async def test_output_is_expected_by_what_was_seen() -> None:
    it = admission()
    assert (it.expected_output(5), it.expected_output(4000)) == (5, 128)
    with it.slot() as place:
        place.expect(1, 4000)
        place.took(0, 20)
        place.ended(0)
    assert it.expected_output(4000) == 20


async def test_what_is_cached_is_not_to_be_computed() -> None:
    it = admission(tokens=1000)
    with it.slot() as first, it.slot() as second:
        first.expect(800, 100)
        refused(lambda: second.expect(100, 10))
        first.routed(8, 0.0, None)
        assert it.queue.tokens == 108
        first.routed(500, 0.0, None)  # never more than it has
        second.expect(800, 60)
        second.took(0, 1)
        second.routed(1, 0.0, None)  # it is computed
        assert it.queue.tokens == 108 + 59
    assert it.queue.tokens == 0


async def test_whoever_is_alone_has_room() -> None:
    it = admission(tokens=100)
    with it.slot() as place:
        place.expect(5000, 10)
        refused(lambda: _expect(it, 1, 1))
    with it.slot() as place:
        place.expect(100, 1)


async def test_the_time_to_come_back_follows_the_measured_rate() -> None:
    clock = Clock()
    it = admission(10, 1000, clock)
    with it.slot() as first:
        first.expect(0, 128)
        for _ in range(64):
            clock.now += 0.1
            first.took(0, 2)  # 20 tokens a second
        with it.slot() as place:
            place.expect(960, 40)
            assert refused(lambda: _expect(it, 50, 50)).retry_after_s == pytest.approx(5.0)
            assert refused(lambda: _expect(it, 5000, 50)).retry_after_s == pytest.approx(50.0)  # all that is inside
    clock.now += 1000  # idle time says nothing
    with it.slot() as place:
        place.expect(960, 40)
        assert refused(lambda: _expect(it, 50, 50)).retry_after_s == pytest.approx(5.0)


async def test_refused_clients_come_back_spread() -> None:
    draws = iter([0.0, 0.5, 1.0])
    it = Admission(1, draw=lambda: next(draws))
    with it.slot():
        assert [refused(it.slot().__enter__).retry_after_s for _ in range(3)] == [1.0, 1.125, 1.25]


async def test_a_tenant_s_minute_is_told_exactly_and_corrected() -> None:
    clock = Clock()
    it = admission(clock=clock)
    tenant = Tenant("acme", limits=Limits(requests_per_minute=60, output_tokens_per_minute=600))
    with it.slot(tenant=tenant) as place:
        place.expect(10, 100)
        place.took(0, 40)
        place.ended(0)
    it.ledger.correct(tenant, Cost(), Cost(output_tokens=560))  # what there was beside it
    with it.slot(tenant=tenant) as place:
        error = refused(lambda: place.expect(10, 100))
        assert error.retry_after_s == 4.0  # the mean of what was seen: 40 tokens, at 10 a second
        assert "600 output tokens a minute" in error.message
        clock.now += 4.0
        place.expect(10, 100)
    for _ in range(60):
        with it.slot(tenant=tenant):
            pass
    error = refused(it.slot(tenant=tenant).__enter__)
    assert error.retry_after_s == 1.0
    with it.slot(tenant=tenant, counted=False):
        pass  # tokenizing costs no request
    assert it.refusals == {("output_tokens_per_minute", "acme"): 1, ("requests_per_minute", "acme"): 1}


@pytest.mark.parametrize(
    ("error", "made", "left"),
    [
        (None, 0, 40),
        (None, 3, 40),
        (Unavailable("x"), 0, 100),
        (Unavailable("x"), 1, 40),
        (Overloaded("x"), 0, 100),
        (InvalidRequest("x"), 0, 40),
        (DeadlineExceeded("x"), 0, 40),
        (asyncio.CancelledError(), 0, 40),
    ],
)
async def test_a_prompt_costs_nothing_where_we_failed(error: BaseException | None, made: int, left: int) -> None:
    it = admission()
    tenant = Tenant("acme", limits=Limits(input_tokens_per_minute=100))
    try:
        with it.slot(tenant=tenant) as place:
            place.expect(60, 5)
            if made:
                place.took(0, made)
            if error is not None:
                raise error
    except BaseException as raised:
        assert raised is error
    assert it.ledger.charge(tenant, Cost(input_tokens=left)) is None
    assert it.ledger.charge(tenant, Cost(input_tokens=1)) is not None


async def test_urgent_ones_take_the_place_of_those_that_wait() -> None:
    it = admission(3, 1000)
    ended: list[str] = []
    with ExitStack() as stack:
        places = {}
        for name, priority in (("started", 9), ("old", 5), ("young", 5)):
            place = places[name] = stack.enter_context(it.slot(priority=priority))
            place.displaceable(lambda name=name: ended.append(name))  # type: ignore[misc]
            place.expect(200, 100)
        places["started"].took(0, 1)
        refused(it.slot(priority=5).__enter__)
        urgent = stack.enter_context(it.slot(priority=4))
        assert ended == ["young"]
        assert it.inside == 4  # it is on its way out
        urgent.expect(550, 100)
        assert ended == ["young", "old"]
        assert (it.queue.places, it.queue.tokens) == (2, 99 + 650)
        refused(lambda: _expect(it, 500, 100))  # as urgent as what waits, or less
        places["young"].took(0, 3)  # what still comes of them changes nothing
        places["young"].ended(0)
        assert (it.queue.places, it.queue.tokens) == (2, 749)
    assert (it.queue.places, it.queue.tokens, it.inside) == (0, 0, 0)


async def test_nobody_is_displaced_in_vain() -> None:
    it = admission(3, 1000)
    with it.slot(priority=5) as lax, it.slot() as other:
        lax.displaceable(lambda: pytest.fail("displaced"))
        lax.expect(100, 10)
        other.expect(800, 20)
        refused(lambda: _expect(it, 900, 10))


async def test_deadlines_within_the_queue() -> None:
    it = admission()
    with it.slot() as waits, it.slot(priority=3) as lax:
        waits.expect(300, 1)
        lax.expect(100, 1)
        for priority, share in ((0, 0.75), (3, 1.0), (-1, 0.0)):
            with it.slot(priority=priority) as place:
                place.routed(1, 10.0, 0.7 * 10.0 * share + 0.01)
                place.routed(1, 10.0, None)
                with pytest.raises(DeadlineExceeded):
                    place.routed(1, 0.0, -0.001)
                if share:
                    error = refused(lambda place=place, share=share: place.routed(1, 10.0, 0.69 * 10 * share))
                    assert f"about {10 * share:.1f} s more" in error.message
    assert it.refusals == {("deadline", ""): 2}


async def test_names_of_refused_tenants_are_bounded() -> None:
    it = Admission(1)
    with it.slot():
        for number in range(2 * MAX_TENANTS):
            refused(it.slot(tenant=Tenant(f"t{number}")).__enter__)
        refused(it.slot(tenant=Tenant("t1")).__enter__)
    assert len(it.refusals) == MAX_TENANTS + 1
    assert it.refusals["queue_places", "t1"] == 2
    assert it.refusals["queue_places", OTHERS] == MAX_TENANTS


TENANTS = [
    ANYONE,
    Tenant("a", limits=Limits(max_requests=3)),
    Tenant("b", limits=Limits(input_tokens_per_minute=500, requests_per_minute=30)),
    Tenant("c", limits=Limits(output_tokens_per_minute=300, max_requests=5)),
]


@dataclass
class Running:
    """A request under way."""

    stack: ExitStack
    place: Place
    tenant: Tenant
    expected: bool = False
    displaced: bool = False
    left: list[int] = field(default_factory=list)  # tokens to come, by answer; 0: ended


class Books(RuleBasedStateMachine):
    """Admission under any sequence of what may happen to it."""

    @initialize(places=st.integers(1, 12), tokens=st.sampled_from([0, 200, 1000]))
    def start(self, places: int, tokens: int) -> None:
        self.clock, self.most = Clock(), tokens
        self.ledger = LocalLedger(self.clock.ns)
        self.it = Admission(places, self.ledger, max_tokens=lambda: self.most, clock=self.clock)
        self.running: list[Running] = []

    @rule(
        tenant=st.sampled_from(TENANTS),
        answers=st.integers(1, 4),
        priority=st.sampled_from([0, 0, -1, 3]),
        counted=st.booleans(),
    )
    def arrive(self, tenant: Tenant, answers: int, priority: int, counted: bool) -> None:
        stack = ExitStack()
        try:
            place = stack.enter_context(self.it.slot(answers, tenant, priority=priority, counted=counted))
        except Overloaded:
            return
        request = Running(stack, place, tenant)
        place.displaceable(lambda: setattr(request, "displaced", True))
        self.running.append(request)

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 100), prompt=st.integers(1, 400), most=st.integers(1, 300))
    def tokenize(self, which: int, prompt: int, most: int) -> None:
        request = self.running[which % len(self.running)]
        if request.expected or request.displaced:
            return
        request.expected = True
        try:
            request.place.expect(prompt, most)
        except Overloaded as error:
            self.end(request, error)
        else:
            request.left = [most] * request.place.answers

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 100), prompt=st.integers(1, 400))
    def route(self, which: int, prompt: int) -> None:
        request = self.running[which % len(self.running)]
        if request.left:
            request.place.routed(prompt, 0.0, 1.0)

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 100), answer=st.integers(0, 3), tokens=st.integers(0, 200), ends=st.booleans())
    def progress(self, which: int, answer: int, tokens: int, ends: bool) -> None:
        request = self.running[which % len(self.running)]
        answer %= request.place.answers
        if not request.left or not request.left[answer]:
            return
        tokens = min(tokens, request.left[answer])
        request.left[answer] -= tokens
        request.place.took(answer, tokens)
        if ends or not request.left[answer]:
            request.left[answer] = 0
            request.place.ended(answer)

    @precondition(lambda self: self.running)
    @rule(
        which=st.integers(0, 100),
        how=st.sampled_from([None, asyncio.CancelledError(), Unavailable("x"), DeadlineExceeded("x"), ValueError("x")]),
    )
    def leave(self, which: int, how: BaseException | None) -> None:
        self.end(self.running[which % len(self.running)], how)

    @rule(seconds=st.sampled_from([0.0, 0.3, 5.0, 100.0]))
    def wait(self, seconds: float) -> None:
        self.clock.now += seconds

    def end(self, request: Running, how: BaseException | None) -> None:
        self.running.remove(request)
        assert not request.stack.__exit__(type(how) if how else None, how, None)
        self.check()

    def check(self) -> None:
        queue = self.it.queue
        charged = [request.place.entry for request in self.running if not request.displaced]
        assert queue.places == sum(entry.places for entry in charged) <= queue.most
        assert queue.tokens == sum(entry.tokens for entry in charged) >= 0
        assert all(left >= 0 for entry in charged for left in entry.outputs)
        big = max((entry.tokens for entry in charged), default=0)
        assert not self.most or queue.tokens <= max(self.most, big)
        assert all(not request.place.entry.tokens for request in self.running if request.displaced)
        waiting = [entry for entry in charged if not entry.started]
        assert list(queue._waiting) == sorted(waiting, key=lambda entry: entry.order)
        assert sum(queue._ahead.values()) == sum(entry.prompt for entry in waiting)
        assert self.it.inside == sum(request.place.entry.places for request in self.running)
        for tenant in TENANTS[1:]:
            assert self.ledger.inside(tenant) <= (tenant.limits.max_requests or 1000)

    def teardown(self) -> None:
        if not hasattr(self, "it"):
            return
        self.check()
        for request in list(self.running):
            self.end(request, None)
        assert not self.ledger._places
        assert (self.it.inside, self.it.queue.places, self.it.queue.tokens) == (0, 0, 0)
        assert not self.it.queue._ahead
        assert self.it._idle.is_set()
        self.clock.now += 10_000
        for tenant in TENANTS:
            assert self.ledger.charge(tenant, Cost(30, 500, 300)) is None  # every minute is whole again


TestBooks = Books.TestCase
TestBooks.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
