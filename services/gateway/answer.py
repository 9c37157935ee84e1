"""Makes the answer of a request from its tokens: text, stop strings, counts and times."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from ...engine.request import FinishReason, Token
from .generation import Finish, Piece, Timings
from .prompt_scores import PromptScores
from .served_model import TextStream
from .stop_strings import StopStrings


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """What the workers said of a request: seconds, and who they are."""

    queue: float = 0.0
    prefill: float = 0.0
    transfer: float = 0.0
    cached_tokens: int = 0
    prefill_worker: str = ""
    decode_worker: str = ""
    replays: int = 0
    route: str = ""  # why these workers


Report: TypeAlias = Callable[[], WorkerReport]
"""Asked for with the first tokens, and at the end."""


class Answer:
    """Fed with merged tokens in order; says when a stop string ends the output before the workers do."""

    def __init__(
        self,
        text: TextStream,
        stop_strings: Sequence[str],
        *,
        prompt_tokens: int,
        seed: int,
        logprobs: bool,
        arrival: float,
        min_tokens: int = 0,
        include_stop: bool = False,
        stop_texts: Mapping[int, str] | None = None,
        scores: PromptScores | None = None,
        sample: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`arrival`: of the request, by `clock`. `min_tokens`: stop strings that end before so many do not count.
        `include_stop`: the stop string is sent. `stop_texts`: the tokens that are sent as text although they end the
        output, with what the text stream leaves out of them. `scores`: go into the first piece.
        `sample`: which answer it is."""
        self._text = text
        self._stops = StopStrings(stop_strings, include=include_stop) if stop_strings else None
        self._min_tokens = min_tokens
        self._stop_texts = stop_texts or {}
        self._scores = scores
        self._sample = sample
        self._prompt_tokens = prompt_tokens
        self._seed = seed
        self._logprobs = logprobs
        self._arrival = arrival
        self._clock = clock
        self._count = 0
        self._cached_tokens = 0
        self._first = self._second = self._last = 0.0  # when these tokens were handed over

    def piece(self, tokens: Sequence[Token], finish: FinishReason | None, report: Report) -> Piece:
        """The next piece; `finish`: the workers end with the last of `tokens`. The last piece has its own `finish`."""
        if finish is None and self._stops is None and self._count and tokens:
            return self._middle(tokens)
        first_index = self._count
        text, taken, stop_string = self._read(tokens, finish)
        if stop_string is not None:
            finish = FinishReason.STOP
        self._count += taken
        if taken > 0:
            self._stamp(first_index)
        if taken < len(tokens):
            tokens = tokens[:taken]
        told = report() if finish is not None or (first_index == 0 and tokens) else None
        if told is not None:
            self._cached_tokens = told.cached_tokens
        return Piece(
            first_index=first_index,
            token_ids=[token.token_id for token in tokens],
            text=text,
            logprobs=[token.logprobs for token in tokens] if self._logprobs else [],
            finish=self._finish(finish, stop_string or "", told) if finish is not None and told is not None else None,
            sample=self._sample,
            prompt_logprobs=self._scores.take() if self._scores is not None else None,
            cached_tokens=self._cached_tokens,
        )

    def _middle(self, tokens: Sequence[Token]) -> Piece:
        """A piece that neither begins nor ends the answer, nor can: nearly all are, and each costs."""
        first_index, push = self._count, self._text.push
        ids = [token.token_id for token in tokens]
        self._count += len(ids)
        self._last = self._clock()
        if first_index == 1:
            self._second = self._last
        return Piece(
            first_index,
            ids,
            push(ids[0]) if len(ids) == 1 else "".join(map(push, ids)),
            [token.logprobs for token in tokens] if self._logprobs else [],
            None,
            self._sample,
            None,
            self._cached_tokens,
        )

    def _read(self, tokens: Sequence[Token], finish: FinishReason | None) -> tuple[str, int, str | None]:
        """(text, tokens taken, stop string that matched)."""
        # The token that ended the output by itself (end of text, a stop token) is reported, but it is not text.
        last = tokens[-1].token_id if tokens and finish is FinishReason.STOP else None
        silent = len(tokens) - 1 if last is not None and last not in self._stop_texts else len(tokens)
        texts = [self._text.push(token.token_id) for token in (tokens if silent == len(tokens) else tokens[:silent])]
        if finish is not None:
            texts.append(self._text.flush() + (self._stop_texts.get(last, "") if last is not None else ""))
        if self._stops is None:
            return "".join(texts), len(tokens), None
        return self._until_stop(self._stops, texts, len(tokens), ended=finish is not None)

    def _until_stop(
        self, stops: StopStrings, texts: list[str], tokens: int, *, ended: bool
    ) -> tuple[str, int, str | None]:
        """The same of the tokens' texts, of which a stop string may end the last, or hold some of it back. `ended`: the
        last of `texts` is what else the end brings, beside the last token."""
        parts: list[str] = []
        for index, new in enumerate(texts):
            index = min(index, tokens - 1)
            text, matched = stops.push(new, counts=self._counts(index))
            parts.append(text)
            if matched is not None:
                return "".join(parts), index + 1, matched
        if ended:
            parts.append(stops.flush())
        return "".join(parts), tokens, None

    def _counts(self, index: int) -> bool:
        """Whether a stop string may end with the token of this index in the piece under way."""
        return self._count + index >= self._min_tokens

    def _stamp(self, first_index: int) -> None:
        """Times by the gateway's clock, each piece as it is handed over."""
        self._last = self._clock()
        if first_index == 0:
            self._first = self._last
        if first_index <= 1 < self._count:
            self._second = self._last

    def _times(self, report: WorkerReport) -> Timings:
        """With the workers' own."""
        return Timings(
            queue=report.queue,
            prefill=report.prefill,
            transfer=report.transfer,
            first_token=self._first - self._arrival if self._count > 0 else 0.0,
            decode=self._last - self._first,
            total=self._last - self._arrival if self._count > 0 else 0.0,
            gap01=self._second - self._first if self._count > 1 else 0.0,
        )

    def _finish(self, reason: FinishReason, stop_string: str, report: WorkerReport) -> Finish:
        return Finish(
            reason=reason,
            stop_string=stop_string,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=report.cached_tokens,
            output_tokens=self._count,
            timings=self._times(report),
            seed=self._seed,
            prefill_worker=report.prefill_worker,
            decode_worker=report.decode_worker,
            replays=report.replays,
            route=report.route,
        )
