"""The simulated chat: its prompts, the workers' caches, and that routing by prefix finds more of them."""

import sys
from pathlib import Path
from types import ModuleType

import pytest

from twostroke.services.gateway.prefixes import prefix_digests

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def simulation(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The benchmark as a module; benchmarks import each other by bare names."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import prefix_simulation

    monkeypatch.delitem(sys.modules, "prefix_simulation")
    return prefix_simulation


def test_each_turn_holds_what_was_said_before(simulation: ModuleType) -> None:
    chat = simulation.Chat(groups=3, conversations=2, turns=4, system=50, user=7, answer=11)
    prompts = list(chat.prompts(1))
    assert prompts == list(chat.prompts(1))
    assert prompts != list(chat.prompts(2))
    assert sorted(map(len, prompts)) == sorted([57, 75, 93, 111] * 6)
    assert len({tuple(prompt[:50]) for prompt in prompts}) == 3
    for prompt in prompts:
        if len(prompt) > 57:
            before = prompt[: len(prompt) - 18]
            assert before in prompts[: prompts.index(prompt)], "a turn came before the one that it follows"


def test_a_worker_s_cache_forgets_the_least_recently_used_and_a_prefix_from_its_end(simulation: ModuleType) -> None:
    worker = simulation.fleet(1, 4)[0]
    first, second = list(range(49)), list(range(100, 149))  # three full pages each
    chains = [prefix_digests(ids, simulation.PAGE, b"x") for ids in (first, second)]
    assert worker.run(chains[0], 49) == 0
    assert worker.run(chains[0], 49) == 48
    assert worker.run(chains[1], 49) == 0
    assert worker.leading(chains[1]) == 3
    assert worker.leading(chains[0]) == 1
    assert worker.computed == worker.load.waiting_tokens == 49 + 1 + 49
    assert len(worker.pages) == 4


def test_routing_by_prefix_finds_more(simulation: ModuleType) -> None:
    chat = simulation.Chat(groups=6, conversations=4, turns=3, system=1024)
    for pairs, gain in ((2, 0.05), (8, 0.25)):
        shares = {
            routing: simulation.simulate(chat.prompts(1), routing, pairs=pairs, pages=4096, drained=400 // pairs).share
            for routing in simulation.ROUTINGS
        }
        assert shares["prefix"] > shares["random"] + gain, shares
        assert shares["prefix"] > shares["load"] + gain, shares


def test_one_pair_leaves_no_choice(simulation: ModuleType) -> None:
    chat = simulation.Chat(groups=2, conversations=2, turns=2, system=64)
    outcomes = [
        simulation.simulate(chat.prompts(3), routing, pairs=1, pages=4096, drained=0) for routing in simulation.ROUTINGS
    ]
    assert outcomes[0] == outcomes[1] == outcomes[2]
    assert outcomes[0].imbalance == 1.0
    prompts = list(chat.prompts(3))
    assert outcomes[0].prompt == sum(map(len, prompts))
    # All of a prompt is cached that an earlier one began with, in full pages.
    cached = 0
    for at, prompt in enumerate(prompts):
        common = max((sum(1 for _ in _common(prompt, other)) for other in prompts[:at]), default=0)
        cached += min(common, len(prompt) - 1) // simulation.PAGE * simulation.PAGE
    assert outcomes[0].cached == cached


def _common(one: list[int], other: list[int]) -> list[int]:
    same = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    return one[:same]
