"""How tokens are to be drawn, as columns: what a sequence asks for is taken apart once, and gathered in each step."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ..batch import Row
from ..logit_rules import LogitRules
from ..request import SamplingParams
from ..sampler import Draw, signed

MAX_TOP = 20  # log-probabilities beside the token's own that are computed on the way; more: by the plain sampler

DRAWN, TOLD, PLAIN, CONSTRAINED = 1, 2, 4, 8
"""Kinds: not simply the likeliest token; with log-probabilities; what only the plain sampler can do; only of the tokens
that a constraint allows."""


class DrawColumns:
    """Entry i of each column speaks of slot i, or of draw i of a step."""

    def __init__(self, wide: npt.NDArray[np.int64], narrow: npt.NDArray[np.int32]) -> None:
        """`wide`: [3, n]: the bits of top-p and min-p (float64), the seed. `narrow`: [5, n]: the bits of the
        temperature (float32), top-k, the sample's index, log-probabilities wanted (-1: none), the kind."""
        self.wide, self.narrow = wide, narrow
        self._kinds: int | None = None  # as they were when last asked for

    @staticmethod
    def zeros(count: int) -> "DrawColumns":
        """To be filled by `put`."""
        return DrawColumns(np.zeros((3, count), np.int64), np.zeros((5, count), np.int32))

    @staticmethod
    def of(draws: Sequence[Draw]) -> "DrawColumns":
        """Of a step."""
        columns = DrawColumns.zeros(len(draws))
        for index, draw in enumerate(draws):
            columns.put(index, draw.params, draw.sample)
        return columns

    def __len__(self) -> int:
        return len(self.narrow[0])

    def put(self, index: int, params: SamplingParams, sample: int) -> None:
        """Entry `index`: a draw for the sample of that index."""
        top = -1 if params.logprobs is None else params.logprobs
        kind = DRAWN * (params.temperature != 0.0) + TOLD * (top >= 0)
        kind += PLAIN * (params.typical_p < 1.0 or top > MAX_TOP or LogitRules.needed(params))
        kind += CONSTRAINED * (params.constraint is not None)
        self.wide.view(np.float64)[:2, index] = params.top_p, params.min_p
        self.wide[2, index] = signed(params.seed)
        self.narrow.view(np.float32)[0, index] = params.temperature
        self.narrow[1:, index] = params.top_k, sample, top, kind
        self._kinds = None

    def take(self, slots: npt.NDArray[np.int32]) -> "DrawColumns":
        """Of a step whose draws are those of these slots."""
        return DrawColumns(self.wide.take(slots, axis=1), self.narrow.take(slots, axis=1))

    @property
    def kinds(self) -> int:
        """Those of any entry."""
        if self._kinds is None:
            self._kinds = int(np.bitwise_or.reduce(self.narrow[4], initial=0))
        return self._kinds

    @property
    def tops(self) -> list[int]:
        """Log-probabilities that each entry wants beside the token's own; -1: not that one either."""
        wanted: list[int] = self.narrow[3].tolist()
        return wanted


def draws_of(drawing: Sequence[Row]) -> list[Draw]:
    """One for each sample of each row."""
    return [
        Draw(row.params, row.key.sample + index, row.start + len(row.token_ids), row.rules, allowed)
        for row in drawing
        for allowed in (None if row.matching is None else row.matching.allowed(),)
        for index in range(row.samples)
    ]
