"""The answers of one request as messages: token by token, or each answer whole."""

from collections.abc import Iterable, Sequence
from typing import Protocol, TypeAlias

from ....engine.request import FinishReason, PromptLogprobs
from ....errors import InvalidRequest
from ....smg import vllm_engine_pb2 as pb
from ..generation import Piece
from .logprobs import input_logprobs, output_logprobs

ABORT = "abort"
ERROR = "error"
ENTRY_BYTES = 16  # of a token or a log-probability, at most, in a message
_REASONS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}

Messages: TypeAlias = list[pb.GenerateResponse]


class Wanted:
    """What all messages of a request have in common."""

    def __init__(self, prompt_ids: Sequence[int], params: pb.SamplingParams) -> None:
        """`prompt_ids` may be set later, but before any message."""
        self.prompt_ids = prompt_ids
        self.answers = params.n or 1
        self.logprobs = params.HasField("logprobs")
        self.top = params.logprobs > 0
        self.prompt_top = params.prompt_logprobs > 0
        self.stop_token_ids = frozenset(params.stop_token_ids)

    def output_logprobs(self, piece: Piece) -> pb.OutputLogProbs | None:
        """Of a piece's tokens, where they were asked for."""
        return output_logprobs(piece.logprobs, top=self.top) if self.logprobs and piece.logprobs else None

    def input_logprobs(self, told: PromptLogprobs) -> pb.InputLogProbs:
        """Of the prompt. Any thread may ask."""
        return input_logprobs(self.prompt_ids, told, top=self.prompt_top)

    def end(self, complete: pb.GenerateComplete, piece: Piece) -> None:
        """Fills in how an answer ended: with this piece, its last one."""
        finish = piece.finish
        if finish is None:
            return
        complete.finish_reason = _REASONS[finish.reason]
        complete.cached_tokens = finish.cached_tokens
        if finish.stop_string:
            complete.matched_stop_str = finish.stop_string
        elif finish.reason is FinishReason.STOP and piece.token_ids and piece.token_ids[-1] in self.stop_token_ids:
            complete.matched_token_id = piece.token_ids[-1]


class Reply(Protocol):
    """Asked for the messages of each piece, in order, then for the rest."""

    def messages(self, piece: Piece, scores: pb.InputLogProbs | None = None) -> Messages:
        """Of a piece, perhaps none. `scores`: those that the piece has. InvalidRequest where the answers are too large
        for one message each."""

    def sent(self, piece: Piece) -> None:
        """Its messages are on their way."""

    def rest(self, reason: str) -> Messages:
        """The ends that are still owed; `reason`: of answers that had not ended."""

    def sign(self) -> pb.GenerateResponse:
        """A message that says nothing."""


class StreamReply:
    """A chunk for each piece with tokens; the end of an answer repeats its last tokens, as vLLM's does."""

    def __init__(self, wanted: Wanted) -> None:
        self._wanted = wanted
        self._cached = [0] * wanted.answers
        self._owed = dict.fromkeys(range(wanted.answers))

    def messages(self, piece: Piece, scores: pb.InputLogProbs | None = None) -> Messages:
        """One or two."""
        told: Messages = []
        logprobs = self._wanted.output_logprobs(piece)
        if piece.token_ids or piece.finish is None:
            chunk = pb.GenerateStreamChunk(
                token_ids=piece.token_ids,
                prompt_tokens=len(self._wanted.prompt_ids),
                completion_tokens=len(piece.token_ids),
                cached_tokens=piece.cached_tokens,
                output_logprobs=logprobs,
                input_logprobs=scores,
                index=piece.sample,
            )
            told.append(pb.GenerateResponse(chunk=chunk))
        if piece.finish is not None:
            complete = self._complete(piece.sample, piece.token_ids)
            if logprobs is not None:
                complete.output_logprobs.CopyFrom(logprobs)
            self._wanted.end(complete, piece)
            told.append(pb.GenerateResponse(complete=complete))
        return told

    def sent(self, piece: Piece) -> None:
        """Notes what is not owed any more."""
        self._cached[piece.sample] = piece.cached_tokens
        if piece.finish is not None:
            self._owed.pop(piece.sample, None)

    def rest(self, reason: str) -> Messages:
        """The ends of answers that had not ended."""
        return [
            pb.GenerateResponse(complete=self._complete(index, (), finish_reason=reason, cached=self._cached[index]))
            for index in self._owed
        ]

    def sign(self) -> pb.GenerateResponse:
        """A chunk that says nothing, of the first answer that goes on."""
        chunk = pb.GenerateStreamChunk(prompt_tokens=len(self._wanted.prompt_ids), index=next(iter(self._owed), 0))
        return pb.GenerateResponse(chunk=chunk)

    def _complete(
        self, index: int, ids: Iterable[int], *, finish_reason: str = "", cached: int = 0
    ) -> pb.GenerateComplete:
        complete = pb.GenerateComplete(
            output_ids=ids,
            prompt_tokens=len(self._wanted.prompt_ids),
            finish_reason=finish_reason,
            cached_tokens=cached,
            index=index,
        )
        complete.completion_tokens = len(complete.output_ids)
        return complete


class WholeReply:
    """Nothing until all answers have ended; then each one whole, the prompt's log-probabilities with all of them."""

    def __init__(self, wanted: Wanted, max_bytes: int) -> None:
        """`max_bytes`: of a message."""
        self._wanted = wanted
        self._left = [max_bytes // ENTRY_BYTES] * wanted.answers
        self._completes = [pb.GenerateComplete(index=index) for index in range(wanted.answers)]
        self._prompt: pb.InputLogProbs | None = None

    def messages(self, piece: Piece, scores: pb.InputLogProbs | None = None) -> Messages:
        """None: it is kept."""
        if scores is not None and piece.prompt_logprobs is not None:
            self._prompt = scores
            entries = len(piece.prompt_logprobs.ids)
            self._left = [left - entries for left in self._left]
        self._left[piece.sample] -= len(piece.token_ids) + sum(len(entries) for entries in piece.logprobs)
        if self._left[piece.sample] < 0:
            raise InvalidRequest("the answer does not fit into one message: ask for a stream", field="stream")
        complete = self._completes[piece.sample]
        complete.output_ids.extend(piece.token_ids)
        complete.cached_tokens = piece.cached_tokens
        logprobs = self._wanted.output_logprobs(piece)
        if logprobs is not None:
            complete.output_logprobs.MergeFrom(logprobs)
        self._wanted.end(complete, piece)
        return []

    def sent(self, piece: Piece) -> None:
        """All is owed until the end."""

    def rest(self, reason: str) -> Messages:
        """All of them."""
        for complete in self._completes:
            complete.prompt_tokens = len(self._wanted.prompt_ids)
            complete.completion_tokens = len(complete.output_ids)
            complete.finish_reason = complete.finish_reason or reason
            if self._prompt is not None:
                complete.input_logprobs.CopyFrom(self._prompt)
        return [pb.GenerateResponse(complete=complete) for complete in self._completes]

    def sign(self) -> pb.GenerateResponse:
        """Never asked for: whoever wants whole answers takes nothing else."""
        return pb.GenerateResponse()
