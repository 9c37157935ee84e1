"""The ticket protocol under generated events, and the proof that these tests would notice: planted faults."""

import random
import re
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from twostroke.errors import TwostrokeError

from .faults import FAULTS, Fault, old_round_believed
from .world import ACTIONS, Violation, World

WALK = 120
NAMES, WEIGHTS = list(ACTIONS), list(ACTIONS.values())


class Protocol(RuleBasedStateMachine):
    """Every rule is one action of the world; hypothesis draws what each of them may vary."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World()

    @invariant()
    def holds(self) -> None:
        self.world.check()

    def teardown(self) -> None:
        self.world.settle()


def _rule(name: str) -> Any:
    def act(self: Protocol, data: st.DataObject) -> None:
        getattr(self.world, name)(lambda n: data.draw(st.integers(0, n - 1)) if n > 1 else 0)

    act.__name__ = name
    return rule(data=st.data())(act)


for _name in ACTIONS:
    setattr(Protocol, _name, _rule(_name))

QUICK = settings(max_examples=120, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck))


def test_generated_events() -> None:
    run_state_machine_as_test(Protocol, settings=QUICK)


@pytest.mark.slow
def test_many_generated_events() -> None:
    run_state_machine_as_test(Protocol, settings=settings(QUICK, max_examples=800, stateful_step_count=80))


def walk(seed: int, **options: Any) -> World:
    """A random walk: quicker than hypothesis, longer, and weighted towards what leads far."""
    rng = random.Random(seed)
    world = World(**options)
    for action in rng.choices(NAMES, WEIGHTS, k=WALK):
        getattr(world, action)(rng.randrange)
        world.check()
    world.settle()
    return world


def test_random_walks_end_in_every_way() -> None:
    ends = {(job.on_decode, job.on_prefill) for seed in range(150) for job in walk(seed).jobs.values()}
    assert {("arrived", "released"), ("lost", "gone"), ("lost", "released"), ("gone", "released")} <= ends


@pytest.mark.slow
def test_many_random_walks() -> None:
    for seed in range(1000, 4000):
        walk(seed)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_planted_fault_is_caught(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    fault(monkeypatch)
    for seed in range(400):
        try:
            walk(seed)
        except (Violation, TwostrokeError) as error:
            if re.search(FAULTS[fault], str(error)):
                return
    pytest.fail("not caught")


def last(n: int) -> int:
    return n - 1


def everywhere(world: World, *actions: str) -> None:
    for action in actions:
        getattr(world, action)(last)
        world.check()


def crossing_completes() -> World:
    """A complete, repeated because the answer was slow, arrives while its pages are being pushed again."""
    world = World()
    p = world.live_prefills()[-1]
    p.late, world.decode().late = True, False
    everywhere(world, "connect", "submit")
    world.jobs[1].total, world.jobs[1].finish = 8, 0
    everywhere(world, "reserve", "expect", "deliver", "step")
    world.land(p, next(iter(p.flights)), corrupt=True)
    everywhere(world, "see_copies")
    world.now += 2.0
    world.run_prefill(p, p.writer.tick(world.now))
    link = world.link(world.decode().incarnation, p.incarnation)
    while link.to_decode and not link.to_prefill:
        world._to_decode(world.decode().incarnation, p.incarnation, link)
    assert len(link.to_decode) == 1  # the repeated one
    while link.to_prefill:
        world._to_prefill(world.decode().incarnation, p.incarnation, link)
    assert p.flights
    world._to_decode(world.decode().incarnation, p.incarnation, link)
    world.check()
    world.settle()
    return world


def test_old_round_believed_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    assert crossing_completes().jobs[1].on_decode == "arrived"
    old_round_believed(monkeypatch)
    with pytest.raises(Violation, match="a hold ended under a copy"):
        crossing_completes()


def predecessors_drained(mix_incarnations: bool) -> World:
    """A prefill worker drains its ticket 1 and dies; the word comes when its successor writes under a ticket 1."""
    world = World(mix_incarnations=mix_incarnations)
    everywhere(world, "connect", "submit", "reserve", "deliver", "cancel_on_decode", "deliver")
    pair = world.decode().incarnation, world.jobs[1].prefill
    while world.link(*pair).to_prefill:
        world._to_prefill(*pair, world.link(*pair))
    world._break(pair, last)
    world.crash_prefill(last)
    world.live_prefills()[-1].late = True
    everywhere(world, "connect", "submit")
    world.jobs[2].total = 8
    everywhere(world, "reserve", "expect", "deliver", "step")
    for _ in range(len(world.limbo)):
        world.late_message(last)
    world.check()
    world.settle()
    return world


def test_old_incarnation_accepted_is_caught() -> None:
    assert predecessors_drained(mix_incarnations=False).jobs[2].on_decode == "arrived"
    with pytest.raises(Violation, match="a hold ended under a copy"):
        predecessors_drained(mix_incarnations=True)
