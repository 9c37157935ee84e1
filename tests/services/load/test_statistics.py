"""Percentiles by definition and against numpy; samples that are bounded and fair."""

import random

import numpy as np
import pytest

from twostroke.services.load.statistics import Sample, percentile


@pytest.mark.parametrize("count", [1, 2, 3, 10, 101, 1000])
def test_percentiles_are_numpys(count: int) -> None:
    values = sorted(np.random.default_rng(count).lognormal(size=count).tolist())
    for percent in (0, 1, 12.5, 50, 90, 99, 99.9, 100):
        assert percentile(values, percent) == pytest.approx(np.percentile(values, percent, method="linear"), rel=1e-12)


def test_percentiles_by_hand() -> None:
    assert percentile([1.0, 2.0, 4.0], 50) == 2.0
    assert percentile([1.0, 2.0, 4.0], 75) == 3.0
    assert percentile([1.0, 2.0], 90) == pytest.approx(1.9)
    assert percentile([7.0], 99) == 7.0


@pytest.mark.parametrize(("values", "percent"), [([], 50), ([1.0], -1), ([1.0], 101), ([1.0], float("nan"))])
def test_percentiles_need_values_and_a_share(values: list[float], percent: float) -> None:
    with pytest.raises(ValueError, match="a percentile needs"):
        percentile(values, percent)


def test_a_sample_is_exact_while_it_is_small() -> None:
    sample, values = Sample(), [random.Random(1).gauss(0, 1) for _ in range(5000)]
    for value in values:
        sample.add(value)
    assert sample.count == 5000
    assert sample.mean == pytest.approx(np.mean(values))
    assert sample.maximum == max(values)
    for percent in (50, 90, 99):
        assert sample.percentile(percent) == pytest.approx(np.percentile(values, percent))
    sample.add(1e9)
    assert sample.percentile(100) == 1e9  # not what was sorted before


def test_an_empty_sample() -> None:
    sample = Sample()
    assert (sample.mean, sample.maximum, sample.percentile(50), sample.count) == (None, None, None, 0)


def test_the_largest_may_be_negative() -> None:
    sample = Sample()
    for value in (-3.0, -1.0, -2.0):
        sample.add(value)
    assert sample.maximum == -1.0


def test_a_large_sample_is_bounded_and_fair() -> None:
    sample = Sample(kept=2000)
    for value in range(40_000):  # rising: a sample that preferred early or late values would show it
        sample.add(float(value))
    assert len(sample._values) == 2000
    assert (sample.count, sample.mean, sample.maximum) == (40_000, 19_999.5, 39_999.0)
    for percent in (10, 50, 90):
        assert sample.percentile(percent) == pytest.approx(400 * percent, abs=5 * 40_000 * 0.5 / 2000**0.5)
