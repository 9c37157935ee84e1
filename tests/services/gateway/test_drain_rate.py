"""How fast a gateway empties."""

import pytest

from twostroke.services.gateway.drain_rate import DrainRate


class Clock:
    now = 50.0

    def __call__(self) -> float:
        return self.now


def busy(rate: DrainRate, clock: Clock, seconds: int, tokens: int, places: int = 0) -> None:
    """So much each second."""
    rate.busy(True)
    for _ in range(seconds * 10):
        clock.now += 0.1
        rate.left(tokens // 10, places)
    rate.busy(False)


def test_nothing_is_known_before_a_second_of_work() -> None:
    clock = Clock()
    rate = DrainRate(clock)
    assert rate.tokens is rate.places is None
    rate.busy(True)
    clock.now += 0.5
    rate.left(500)
    clock.now += 0.4
    assert rate.tokens is None
    clock.now += 0.6
    assert rate.tokens == pytest.approx(500 / 1.5)
    assert rate.places is None  # none left yet


def test_it_follows_what_changes() -> None:
    clock = Clock()
    rate = DrainRate(clock)
    busy(rate, clock, 60, 1000, places=1)
    assert rate.tokens == pytest.approx(1000, rel=0.05)
    assert rate.places == pytest.approx(10, rel=0.05)
    busy(rate, clock, 60, 100)
    assert rate.tokens == pytest.approx(100, rel=0.6)
    busy(rate, clock, 120, 100)
    assert rate.tokens == pytest.approx(100, rel=0.1)


def test_idle_time_does_not_count() -> None:
    clock = Clock()
    rate = DrainRate(clock)
    busy(rate, clock, 10, 1000)
    before = rate.tokens
    clock.now += 3600
    assert rate.tokens == before
    busy(rate, clock, 5, 1000)
    assert rate.tokens == pytest.approx(1000, rel=0.05)
    clock.now += 1
    assert rate.tokens == pytest.approx(1000, rel=0.05)


def test_standing_still_while_busy_does() -> None:
    clock = Clock()
    rate = DrainRate(clock)
    busy(rate, clock, 10, 1000)
    rate.busy(True)
    clock.now += 10
    assert rate.tokens is not None
    assert rate.tokens < 600
