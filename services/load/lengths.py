"""Distributions of token counts for generated load: fixed, uniform, log-normal."""

import math
import re
from dataclasses import dataclass
from typing import Protocol

from ...errors import ConfigError

LONGEST = 1 << 24
TAKES = "a length (512), a range (100-2000) or lognormal:MEAN:SIGMA (lognormal:512:0.5)"
_FIXED = re.compile(r"\d{1,8}", re.ASCII)
_UNIFORM = re.compile(r"(\d{1,8})-(\d{1,8})", re.ASCII)
_LOGNORMAL = re.compile(r"lognormal:(\d{1,8}(?:\.\d+)?):(\d{1,2}(?:\.\d+)?)", re.ASCII)


class Noise(Protocol):
    """What is used of `numpy.random.Generator`."""

    def integers(self, low: int, high: int) -> int:
        """Uniform over low to high - 1."""

    def lognormal(self, mean: float, sigma: float) -> float:
        """exp of a normal variable with these parameters."""


@dataclass(frozen=True, slots=True)
class Uniform:
    """`low` to `high` tokens, both included, each as likely; a fixed length where they are equal."""

    low: int
    high: int

    @property
    def longest(self) -> int | None:
        """Nothing longer is drawn."""
        return self.high

    def draw(self, noise: Noise) -> int:
        """A length; a fixed one takes no noise."""
        return self.low if self.low == self.high else int(noise.integers(self.low, self.high + 1))

    def __str__(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low}-{self.high}"


@dataclass(frozen=True, slots=True)
class LogNormal:
    """Lengths whose logarithm is normal with deviation `sigma`; `mean` is that of the lengths themselves."""

    mean: float
    sigma: float

    @property
    def longest(self) -> int | None:
        """There is no bound: whoever draws cuts to what fits."""
        return None

    def draw(self, noise: Noise) -> int:
        """A length of at least 1, rounded. exp(mu + sigma^2 / 2) is the mean, which gives mu."""
        drawn = float(noise.lognormal(math.log(self.mean) - self.sigma**2 / 2, self.sigma))
        return max(1, round(min(drawn, LONGEST)))

    def __str__(self) -> str:
        return f"lognormal:{self.mean:g}:{self.sigma:g}"


Lengths = Uniform | LogNormal


def parse_lengths(text: str, field: str) -> Lengths:
    """Reads `512`, `100-2000` or `lognormal:512:0.5`; ConfigError that names `field` for anything else."""
    lengths: Lengths | None = None
    if _FIXED.fullmatch(text):
        lengths = Uniform(int(text), int(text))
    elif match := _UNIFORM.fullmatch(text):
        lengths = Uniform(int(match[1]), int(match[2]))
    elif match := _LOGNORMAL.fullmatch(text):
        lengths = LogNormal(float(match[1]), float(match[2]))
    fits = (
        1 <= lengths.low <= lengths.high <= LONGEST
        if isinstance(lengths, Uniform)
        else lengths is not None and 1 <= lengths.mean <= LONGEST and 0 <= lengths.sigma <= 5
    )
    if lengths is None or not fits:
        raise ConfigError(f"{field}: got {text!r}, takes {TAKES}, of at least 1 token", field=field)
    return lengths
