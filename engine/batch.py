"""One step's work, as the scheduler hands it to the model runner."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from .logit_rules import LogitRules
from .request import ChunkProgress, PromptLogprobs, SamplingParams, SequenceKey, Token


@dataclass(slots=True)
class Scoring:
    """Prompt log-probabilities that a step computes beside its tokens."""

    first: int  # position of targets[0]: above the row's start, up to its end
    targets: list[int]  # prompt tokens, each the successor of a token of the row
    top: int  # how many most likely tokens are told beside each
    result: PromptLogprobs | None = None  # filled in by the runner


class NextTokens(Protocol):
    """What a constraint allows (`matching.Matching`)."""

    def allowed(self) -> npt.NDArray[np.int32]:
        """[ceil(vocab / 32)]: bit t % 32 of word t // 32 is 1 where token t may come next. Valid until asked again."""
        ...


@dataclass(slots=True, eq=False)
class Row:
    """A sequence's share of a step: its tokens at positions start .. start + len(token_ids) - 1.

    While a sequence decodes it has one row, of which `start`, `token_ids[0]` and the content of `pages` change.
    """

    key: SequenceKey
    token_ids: list[int]  # a prompt chunk, or one token when decoding: UNSEEN where the step before this one draws it
    start: int  # position of token_ids[0]; what comes before is in the pool, or written by this step's other rows
    pages: list[int]  # the block table; covers start + len(token_ids) positions
    params: SamplingParams
    sample: bool  # draw the token after the last one
    progress: ChunkProgress | None = None  # PREFILL sequences: what the layer hook is told
    rules: LogitRules | None = None  # where it samples and `params` ask for more than filters; up to date
    matching: NextTokens | None = None  # where it samples under a constraint; asked once the tokens before are known
    scoring: Scoring | None = None
    samples: int = 1  # with `sample`: tokens to draw, for the samples from `key.sample` on
    note: Any = None  # the runner's own: what it looked up for this row


UNSEEN = -1  # a token that only the runner knows yet

LayerHook: TypeAlias = Callable[[int, list[ChunkProgress]], None]
"""Called by the runner, on the engine's thread, with a layer's index once that layer's KV of the step is written; only
in steps that have PREFILL rows. It must not raise and must not touch the engine. With a runner that overlaps, the write
is launched, on the device's current stream, and not yet computed."""


StepWait: TypeAlias = Callable[["Launched"], None]
"""Called on the engine's thread before the tokens of a launched step are asked for: may wait until it is computed, and
do something else meanwhile. It must not raise and must not touch the engine, which is in the middle of a step."""


class Launched(Protocol):
    """A step on its way. One of a device has an `event` too: its `query()` tells whether it is computed, and its
    `synchronize()` waits for that.
    """

    def draw(self) -> None:
        """Called where a row has a `matching`, once the step before has been taken in: only now may it be asked. What
        draws its tokens is launched, if that was not done with the step. The engine's thread, before `tokens`.
        """
        ...

    def tokens(self) -> list[Token]:
        """Waits until the step is computed; `row.samples` tokens for each row with `sample`, in row order."""
        ...


@dataclass(frozen=True, slots=True)
class Computed:
    """A step that is computed already."""

    result: list[Token]

    def draw(self) -> None:
        """As `Launched.draw`: it has drawn already."""

    def tokens(self) -> list[Token]:
        """As `Launched.tokens`; at once."""
        return self.result


@dataclass(frozen=True, slots=True)
class Failed:
    """A step that could not be launched."""

    error: Exception

    def draw(self) -> None:
        """As `Launched.draw`: there is nothing to be drawn."""

    def tokens(self) -> list[Token]:
        """Raises what happened."""
        raise self.error


class Runner(Protocol):
    """Computes steps (the model, or a stand-in in tests)."""

    @property
    def overlaps(self) -> bool:
        """Whether `launch` returns before the step is computed, so that another may be launched behind it."""
        ...

    def launch(self, rows: list[Row], hook: LayerHook | None) -> Launched:
        """Begins to write the rows' KV, to draw the tokens after them, and to fill in `Row.scoring`.

        Rows of one step may depend on each other's KV of that step, and steps on that of those launched before. The
        lists in `rows` are the engine's: read them only during the call. With `overlaps` `Launched.draw` asks a
        row's `matching`; without it all is known at the call.
        """
        ...

    def copy_pages(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copies pages of all layers: targets[i] gets the content of sources[i]. No page is in both."""
        ...
