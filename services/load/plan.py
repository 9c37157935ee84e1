"""What a load consists of: prompts, output lengths and arrival times, all of them functions of a seed.

Request `index` of a plan is the same whoever asks for it and when: neither the concurrency nor the order changes it.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ...errors import ConfigError
from .lengths import Lengths

_REQUESTS, _WARM_UP, _PREFIXES, _WARM_UP_PREFIXES, _ARRIVALS = range(5)  # independent streams of noise


@dataclass(frozen=True, slots=True)
class Limits:
    """What the model takes, in tokens, and the ids that prompts are made of."""

    context: int
    max_input: int
    max_output: int
    ids: npt.NDArray[np.int64]  # [n], the vocabulary without special and end-of-text tokens

    @classmethod
    def of(cls, *, context: int, max_input: int, max_output: int, vocabulary: int, without: set[int]) -> "Limits":
        """`without`: ids that must not stand in a prompt. ConfigError where none is left."""
        ids = np.setdiff1d(np.arange(vocabulary), np.fromiter(without, np.int64, len(without)))
        if not len(ids):
            raise ConfigError("the model's vocabulary has nothing but special tokens")
        return cls(context, max_input, max_output, ids)


@dataclass(frozen=True, slots=True)
class LoadSpec:
    """The load as asked for."""

    input: Lengths
    output: Lengths
    prefix_tokens: int = 0  # in front of each prompt, beside `input`
    prefix_groups: int = 1  # so many different ones
    seed: int = 0


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request."""

    index: int
    prompt: list[int]
    max_tokens: int
    seed: int  # of its sampling
    group: int  # whose prefix it begins with
    cut: bool  # a length was drawn that does not fit, and was shortened


class LoadPlan:
    """Makes requests, one at a time: it holds no list of them."""

    def __init__(self, spec: LoadSpec, limits: Limits, *, run: int = 0) -> None:
        """`run`: which of several loads of one seed. ConfigError for lengths that cannot fit the model."""
        self.spec, self._limits, self._run = spec, limits, run
        output = spec.output.longest
        self._most_output = limits.max_output if output is None else output
        self._most_prompt = min(limits.max_input, limits.context - (1 if output is None else output))
        self._check()

    def _check(self) -> None:
        spec, limits = self.spec, self._limits
        if spec.output.longest is not None and spec.output.longest > limits.max_output:
            raise ConfigError(f"output: got {spec.output}, the model gives up to {limits.max_output}", field="output")
        longest = spec.prefix_tokens + (spec.input.longest or 1)
        if longest > self._most_prompt:
            what = f"{spec.input}" + (f" after a prefix of {spec.prefix_tokens}" if spec.prefix_tokens else "")
            room = f"the model takes prompts of up to {max(0, self._most_prompt)} tokens beside {spec.output} of output"
            raise ConfigError(f"input: got {what}, {room}", field="input")

    def request(self, index: int, *, warm_up: bool = False) -> PlannedRequest:
        """Request `index`, from 0. Warm-up requests have prompts and prefixes of their own: they warm no cache."""
        noise = self._noise(_WARM_UP if warm_up else _REQUESTS, index)
        spec = self.spec
        group = int(noise.integers(0, spec.prefix_groups)) if spec.prefix_tokens else 0
        wanted_input, wanted_output = spec.input.draw(noise), spec.output.draw(noise)
        own = min(wanted_input, self._most_prompt - spec.prefix_tokens)
        output = min(wanted_output, self._most_output, self._limits.context - spec.prefix_tokens - own)
        prefix = self._prefix(group, warm_up) if spec.prefix_tokens else []
        return PlannedRequest(
            index=index,
            prompt=prefix + self._ids(noise, own),
            max_tokens=output,
            seed=int(noise.integers(0, 1 << 63)),
            group=group,
            cut=(own, output) != (wanted_input, wanted_output),
        )

    def arrivals(self, rate: float) -> Iterator[float]:
        """Times of a Poisson process of `rate` a second, in seconds from its beginning, without end."""
        noise = self._noise(_ARRIVALS, 0)
        return itertools.accumulate(float(noise.exponential(1 / rate)) for _ in itertools.count())

    def _prefix(self, group: int, warm_up: bool) -> list[int]:
        return self._ids(self._noise(_WARM_UP_PREFIXES if warm_up else _PREFIXES, group), self.spec.prefix_tokens)

    def _ids(self, noise: np.random.Generator, count: int) -> list[int]:
        ids: list[int] = self._limits.ids[noise.integers(0, len(self._limits.ids), count)].tolist()
        return ids

    def _noise(self, stream: int, index: int) -> np.random.Generator:
        return np.random.default_rng((self.spec.seed, self._run, stream, index))
