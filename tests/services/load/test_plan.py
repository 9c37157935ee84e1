"""Planned load: the same for the same seed, within what the model takes, arrivals that are a Poisson process."""

import dataclasses
import itertools

import numpy as np
import pytest

from twostroke.errors import ConfigError
from twostroke.services.load.lengths import LogNormal, Uniform
from twostroke.services.load.plan import Limits, LoadPlan, LoadSpec

SPECIALS = {0, 1, 2, 17, 299}
LIMITS = Limits.of(context=2048, max_input=2047, max_output=2047, vocabulary=300, without=SPECIALS)
SPEC = LoadSpec(Uniform(10, 60), Uniform(1, 20), seed=5)


def test_the_same_seed_gives_the_same_load_in_any_order() -> None:
    plan = LoadPlan(SPEC, LIMITS)
    forwards = [plan.request(index) for index in range(50)]
    again = LoadPlan(SPEC, LIMITS)
    assert [again.request(index) for index in reversed(range(50))] == forwards[::-1]
    assert [request.index for request in forwards] == list(range(50))


def test_other_seeds_runs_and_indices_give_other_prompts() -> None:
    plans = [LoadPlan(dataclasses.replace(SPEC, seed=seed), LIMITS, run=run) for seed in (5, 6) for run in (0, 1)]
    prompts = [tuple(plan.request(index).prompt) for plan in plans for index in range(20)]
    prompts += [tuple(plans[0].request(index, warm_up=True).prompt) for index in range(20)]
    assert len(set(prompts)) == len(prompts)
    assert len({plans[0].request(index).seed for index in range(20)}) == 20


def test_prompts_are_of_the_vocabulary_without_specials() -> None:
    plan = LoadPlan(dataclasses.replace(SPEC, prefix_tokens=30, prefix_groups=3), LIMITS)
    seen = {token for index in range(300) for token in plan.request(index).prompt}
    assert seen == set(range(300)) - SPECIALS


def test_ids_outside_of_the_vocabulary_are_no_matter() -> None:
    limits = Limits.of(context=8, max_input=7, max_output=7, vocabulary=5, without={4, 5, 900})
    assert limits.ids.tolist() == [0, 1, 2, 3]
    with pytest.raises(ConfigError, match="nothing but special tokens"):
        Limits.of(context=8, max_input=7, max_output=7, vocabulary=3, without={0, 1, 2})


def test_lengths_are_those_asked_for() -> None:
    plan = LoadPlan(SPEC, LIMITS)
    requests = [plan.request(index) for index in range(500)]
    assert {len(request.prompt) for request in requests} == set(range(10, 61))
    assert {request.max_tokens for request in requests} == set(range(1, 21))
    assert not any(request.cut for request in requests)


def test_prefixes_are_shared_by_group_and_by_nobody_else() -> None:
    plan = LoadPlan(LoadSpec(Uniform(8, 8), Uniform(4, 4), prefix_tokens=32, prefix_groups=3, seed=1), LIMITS)
    requests = [plan.request(index) for index in range(120)]
    assert {len(request.prompt) for request in requests} == {40}
    prefixes = {request.group: tuple(request.prompt[:32]) for request in requests}
    assert sorted(prefixes) == [0, 1, 2]
    assert len(set(prefixes.values())) == 3
    assert all(tuple(request.prompt[:32]) == prefixes[request.group] for request in requests)
    assert len({tuple(request.prompt[32:]) for request in requests}) == 120
    assert all(20 <= sum(request.group == group for request in requests) <= 60 for group in range(3))
    warm_up = [tuple(plan.request(index, warm_up=True).prompt[:32]) for index in range(20)]
    assert not set(warm_up) & set(prefixes.values())


@pytest.mark.parametrize(
    ("spec", "field", "words"),
    [
        (LoadSpec(Uniform(2000, 2000), Uniform(100, 100)), "input", "prompts of up to 1948 tokens beside 100 of"),
        (LoadSpec(Uniform(1, 1949), Uniform(1, 100)), "input", "got 1-1949"),
        (LoadSpec(Uniform(1900, 1900), Uniform(1, 100), 49), "input", "got 1900 after a prefix of 49"),
        (LoadSpec(Uniform(1, 1), Uniform(2048, 2048)), "output", "got 2048, the model gives up to 2047"),
        (LoadSpec(LogNormal(100, 1), Uniform(1, 1), 2047), "input", "after a prefix of 2047"),
    ],
)
def test_what_cannot_fit_is_refused(spec: LoadSpec, field: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        LoadPlan(spec, LIMITS)
    assert caught.value.field == field


@pytest.mark.parametrize("output", [Uniform(100, 100), LogNormal(900, 1.5)])
def test_unbounded_lengths_are_cut_to_what_fits(output: Uniform | LogNormal) -> None:
    plan = LoadPlan(LoadSpec(LogNormal(900, 1.5), output, prefix_tokens=100, prefix_groups=1), LIMITS)
    requests = [plan.request(index) for index in range(300)]
    assert all(101 <= len(request.prompt) <= 2047 for request in requests)
    assert all(1 <= request.max_tokens <= 2047 for request in requests)
    assert all(len(request.prompt) + request.max_tokens <= 2048 for request in requests)
    assert 0 < sum(request.cut for request in requests) < 300
    if output.longest is not None:
        assert {request.max_tokens for request in requests} == {100}


def test_exactly_what_fits_is_taken() -> None:
    request = LoadPlan(LoadSpec(Uniform(1948, 1948), Uniform(100, 100)), LIMITS).request(0)
    assert (len(request.prompt), request.max_tokens, request.cut) == (1948, 100, False)


def test_arrivals_are_a_poisson_process() -> None:
    plan = LoadPlan(SPEC, LIMITS)
    times = np.array(list(itertools.islice(plan.arrivals(40.0), 20_000)))
    gaps = np.diff(times, prepend=0.0)
    assert gaps.min() > 0
    assert abs(len(times) / times[-1] - 40.0) < 4 * 40.0 / np.sqrt(len(times))
    # Exponential: the deviation equals the mean, and gaps do not depend on each other.
    assert abs(gaps.std() / gaps.mean() - 1) < 0.04
    assert abs(np.corrcoef(gaps[:-1], gaps[1:])[0, 1]) < 0.03
    # Kolmogorov-Smirnov against 1 - exp(-rate t), 0.1 %.
    ranks = np.arange(1, len(gaps) + 1) / len(gaps)
    assert np.abs(ranks - (1 - np.exp(-40.0 * np.sort(gaps)))).max() < 1.95 / np.sqrt(len(gaps))
    # Counts in equal times: variance equals mean.
    counts = np.bincount(times.astype(int))[:-1]
    assert abs(counts.var() / counts.mean() - 1) < 0.25


def test_arrivals_are_the_same_for_the_same_seed() -> None:
    def first(seed: int, run: int, rate: float) -> list[float]:
        plan = LoadPlan(dataclasses.replace(SPEC, seed=seed), LIMITS, run=run)
        return list(itertools.islice(plan.arrivals(rate), 10))

    assert first(1, 0, 3.0) == first(1, 0, 3.0)
    assert first(1, 0, 3.0) != first(2, 0, 3.0)
    assert first(1, 0, 3.0) != first(1, 1, 3.0)
    assert first(1, 0, 6.0) == pytest.approx([time / 2 for time in first(1, 0, 3.0)])
