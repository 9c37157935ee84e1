"""Lengths of prompts and outputs: what is read, and that what is drawn has the distribution that was asked for."""

import math

import numpy as np
import pytest

from twostroke.errors import ConfigError
from twostroke.services.load.lengths import LogNormal, Uniform, parse_lengths


@pytest.mark.parametrize(
    ("text", "lengths"),
    [
        ("512", Uniform(512, 512)),
        ("1", Uniform(1, 1)),
        ("100-2000", Uniform(100, 2000)),
        ("7-7", Uniform(7, 7)),
        ("lognormal:512:0.5", LogNormal(512, 0.5)),
        ("lognormal:12.5:0", LogNormal(12.5, 0)),
    ],
)
def test_reads(text: str, lengths: Uniform | LogNormal) -> None:
    assert parse_lengths(text, "input") == lengths
    assert parse_lengths(str(lengths), "input") == lengths


@pytest.mark.parametrize(
    "text",
    ["", "0", "-1", "5-", "20-10", "0-5", "1.5", "a", "lognormal:512", "lognormal:0:1", "lognormal:5:9", "normal:5:1",
     "999999999", "٣", "99999999"],
)  # fmt: skip
def test_refuses(text: str) -> None:
    with pytest.raises(ConfigError, match=r"output: got .* takes a length") as caught:
        parse_lengths(text, "output")
    assert caught.value.field == "output"


def test_fixed_lengths_take_no_noise() -> None:
    noise = np.random.default_rng(1)
    before = noise.bit_generator.state
    assert {Uniform(9, 9).draw(noise) for _ in range(20)} == {9}
    assert noise.bit_generator.state == before


def test_uniform_lengths_keep_their_bounds_and_mean() -> None:
    noise = np.random.default_rng(2)
    drawn = np.array([Uniform(3, 12).draw(noise) for _ in range(20_000)])
    counts = np.bincount(drawn)
    assert set(np.flatnonzero(counts)) == set(range(3, 13))
    chi_square = float(((counts[3:] - 2000) ** 2 / 2000).sum())
    assert chi_square < 27.9  # 9 degrees of freedom, 0.1 %
    assert Uniform(3, 12).longest == 12


def test_lognormal_lengths_have_the_mean_and_the_spread() -> None:
    noise = np.random.default_rng(3)
    drawn = np.array([LogNormal(512, 0.5).draw(noise) for _ in range(50_000)], dtype=float)
    deviation = 512 * math.sqrt(math.exp(0.25) - 1)  # of a log-normal variable
    assert abs(drawn.mean() - 512) < 4 * deviation / math.sqrt(len(drawn))
    assert abs(np.log(drawn).std() - 0.5) < 0.01
    assert drawn.min() >= 1
    assert LogNormal(512, 0.5).longest is None


def test_lognormal_lengths_are_whole_and_at_least_one() -> None:
    noise = np.random.default_rng(4)
    assert {LogNormal(1, 3).draw(noise) for _ in range(200)} >= {1}
    assert {LogNormal(40, 0).draw(noise) for _ in range(5)} == {40}
    assert all(isinstance(LogNormal(30, 1).draw(noise), int) for _ in range(5))
    assert all(LogNormal(1 << 24, 5).draw(noise) <= 1 << 24 for _ in range(100))
