"""Estimates of speeds: they converge, follow what changes, and fade to what is expected otherwise."""

import random

import pytest

from twostroke.services.gateway.speeds import HALF_LIFE_S, OUTLIER_S, Delay, Rate


def test_nothing_seen() -> None:
    rate = Rate()
    assert rate.last is None
    assert rate.expected(5.0, None) is None
    assert rate.expected(5.0, 100.0) == 100.0
    assert Delay().expected(1e9, 5.0, 0.25) == 0.25


@pytest.mark.parametrize(("tokens", "seconds"), [(0, 1.0), (10, 0.0), (-5, 1.0), (10, -1.0)])
def test_nonsense_is_no_evidence(tokens: int, seconds: float) -> None:
    rate = Rate()
    rate.add(tokens, seconds, 1.0)
    assert rate.last is None


def test_a_rate_is_tokens_over_time_whatever_the_pieces() -> None:
    rate = Rate()
    for tokens, seconds in ((1000, 0.5), (10, 0.005), (3000, 1.5)):
        rate.add(tokens, seconds, 7.0)
    assert rate.last == pytest.approx(2000)
    assert rate.expected(7.0, None) == pytest.approx(2000)


def test_a_noisy_rate_converges() -> None:
    noise, rate = random.Random(1), Rate()
    for second in range(120):
        rate.add(1000, 0.5 * noise.uniform(0.5, 1.5), float(second))
    assert rate.expected(120.0, 50.0) == pytest.approx(2000, rel=0.1)


def test_a_rate_follows_a_change() -> None:
    rate = Rate()
    for second in range(100):
        rate.add(1000, 0.1, float(second))
    for second in range(100, 100 + round(5 * HALF_LIFE_S)):
        rate.add(200, 0.2, float(second))
    assert rate.expected(100 + 5 * HALF_LIFE_S, None) == pytest.approx(1000, rel=0.2)


def test_old_evidence_fades_to_the_prior_and_stays_without_one() -> None:
    rate = Rate()
    rate.add(10, 1.0, 0.0)  # very slow, once
    seen = [rate.expected(now, 10_000.0) or 0.0 for now in (0.0, 60.0, 120.0, 600.0)]
    assert seen == sorted(seen)
    assert seen[0] < 600
    assert seen[-1] == pytest.approx(10_000, rel=0.01)
    assert rate.expected(600.0, None) == pytest.approx(10)


def test_a_delay_has_a_fixed_part_and_one_by_size() -> None:
    delay = Delay()
    for index in range(40):
        nbytes = (index % 4 + 1) * 1e8
        delay.add(nbytes, 0.002 + nbytes / 50e9, float(index))
    assert delay.expected(2e8, 40.0, 0.0) == pytest.approx(0.006, rel=0.05)
    assert delay.expected(1e9, 40.0, 0.0) == pytest.approx(0.022, rel=0.05)
    assert delay.expected(0, 40.0, 0.0) == pytest.approx(0.002, rel=0.05)


def test_one_size_alone_gives_no_slope() -> None:
    delay = Delay()
    for second in range(50):
        delay.add(1e8, 0.003, float(second))
    assert delay.expected(1e10, 50.0, 0.003) == pytest.approx(0.003)


def test_less_for_more_bytes_is_noise() -> None:
    delay = Delay()
    delay.add(1e8, 0.010, 0.0)
    delay.add(2e8, 0.001, 0.0)
    assert delay.expected(1e9, 0.0, 0.0) >= 0


def test_an_outlier_counts_little_and_a_change_soon() -> None:
    delay = Delay()
    for second in range(30):
        delay.add(1e8, 0.004, float(second))
    delay.add(1e8, 9.0, 30.0)  # frozen, and thawed
    assert delay.expected(1e8, 30.0, 0.0) < 0.004 + OUTLIER_S / 10
    for second in range(31, 130):
        delay.add(1e8, 9.0, float(second))
    assert delay.expected(1e8, 130.0, 0.0) == pytest.approx(9.0, rel=0.1)


def test_an_old_delay_is_forgotten() -> None:
    delay = Delay()
    delay.add(1e8, 5.0, 0.0)
    assert delay.expected(1e8, 0.0, 0.0) > 3
    assert delay.expected(1e8, 20 * HALF_LIFE_S, 0.0) < 0.001
