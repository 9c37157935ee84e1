"""Everything that a step may run is run once before the engine serves: kernels compiled, libraries loaded."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import count

import numpy as np
import numpy.typing as npt
import torch

from ..batch import Row, Scoring
from ..config import EngineOptions
from ..logit_rules import LogitRules
from ..request import Constraint, ConstraintKind, SamplingParams, SequenceKey
from ..scoring import HEAD_ROWS
from .runner import CudaRunner

# Numbers of rows between which no product changes its kernel (those that the table was tuned with are among them).
CLOSE = (1, 2, 4, *range(8, 64, 8), *range(64, 257, 16))
GREEDY = SamplingParams(temperature=0.0)
DRAWS = (
    SamplingParams(temperature=0.7),
    SamplingParams(temperature=1.0, top_k=40, top_p=0.9, min_p=0.05, logprobs=5),
    SamplingParams(temperature=0.0, logprobs=0),
    SamplingParams(temperature=1.0, typical_p=0.9, repetition_penalty=1.1, logit_bias=((1, 0.5),), min_tokens=4),
)


class Anything:
    """A constraint that allows every token. Implements `batch.NextTokens`."""

    def __init__(self, vocab_size: int) -> None:
        self._words = np.full(-(-vocab_size // 32), -1, np.int32)

    def allowed(self) -> npt.NDArray[np.int32]:
        """All."""
        return self._words


def warm_up(runner: CudaRunner, options: EngineOptions, context: int, vocab_size: int) -> None:
    """Runs steps of every form; they write to the sink page only. `context`: the model's, in tokens."""
    for rows in _steps(options, context, vocab_size):
        runner.launch(rows, None).tokens()
    pages = [0] * 4
    runner.copy_pages(pages, pages)
    if runner.overlaps and torch.cuda.is_available():
        torch.cuda.synchronize()


def _steps(options: EngineOptions, context: int, vocab_size: int) -> Iterator[list[Row]]:
    numbers = count()

    def row(tokens: int, start: int = 0, params: SamplingParams = GREEDY, sample: bool = True) -> Row:
        pages = [0] * (-(-(start + tokens) // options.page_size))
        key = SequenceKey(0, next(numbers), 0, 0)  # no gateway has the incarnation 0
        return Row(key, [0] * tokens, start, pages, params, sample)

    most = min(options.token_budget, context)
    yield [row(most)]  # the largest first: what the libraries take for it serves the others
    size = most // 2
    while size > 1:
        yield [row(size), row(1, start=min(size, context - 1))][: options.max_batch]
        yield [row(size - 1, start=1), row(size // 2 + 1, sample=False)][: options.max_batch]
        size //= 2
    yield [row(1, sample=False)]
    for rows in sorted({3, *CLOSE, options.max_batch, min(options.token_budget, CLOSE[-1])}):
        if rows <= options.max_batch:  # so many tokens, of which so many are drawn
            yield [row(1, start=number % context) for number in range(rows)]
        elif rows <= options.token_budget:
            yield [row(min(context, rows - first)) for first in range(0, rows, context)][: options.max_batch]
    for params in DRAWS:
        drawn = row(2, params=params)
        if LogitRules.needed(params):
            drawn.rules = LogitRules(params, 1)
            drawn.rules.update([0, 0])
        yield [drawn, row(1)][: options.max_batch]
        yield [drawn]
        constrained = row(2, params=replace(params, constraint=Constraint(ConstraintKind.JSON_OBJECT)))
        constrained.rules, constrained.matching = drawn.rules, Anything(vocab_size)
        yield [constrained, row(1)][: options.max_batch]
    several = row(3, params=DRAWS[1])
    several.samples = min(3, options.max_batch)
    yield [several]
    for targets in sorted({min(number, most - 1) for number in CLOSE if number <= 2 * HEAD_ROWS}):
        scored = row(targets + 1)
        scored.scoring = Scoring(1, [0] * targets, 2)
        yield [scored]
