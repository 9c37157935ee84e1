"""What goes back: pieces of the answers to a request as responses, each with an element an answer in its tensors."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ....errors import InvalidRequest
from ....oip import grpc_service_pb2 as pb
from ..generation import Piece
from ..http.logprobs import TokenNames, ranked_entry
from .request import VERSION, InferRequest
from .tensors import write_output

FINAL = "triton_final_response"
RUNNING = "None"  # the reason to finish of an answer that goes on, as the backend says it


@dataclass(slots=True)
class _Answer:
    """What was not sent yet, and what goes with every response."""

    texts: list[str] = field(default_factory=list)
    logprobs: list[str] = field(default_factory=list)
    tokens: int = 0
    reason: str = RUNNING
    likelihood: float = 0.0  # sum of log-probabilities, over all of it


class Reply:
    """Of one request. `take` pieces; `response` holds what came since the last one."""

    def __init__(
        self, asked: InferRequest, model: str, names: TokenNames, *, prompt_tokens: int, most_bytes: int
    ) -> None:
        """`prompt_tokens`: for the client that asked. `most_bytes`: of one response; a whole answer may be longer."""
        self._asked = asked
        self._model = model
        self._names = names
        self._prompt_tokens = prompt_tokens
        self._most = most_bytes
        self._bytes = 0
        self._answers = [_Answer() for _ in range(asked.fields.n)]
        self._ended = 0
        if asked.prepend:
            for answer in self._answers:
                answer.texts.append(asked.text)
            self._bytes = len(asked.text.encode("utf-8", "replace")) * asked.fields.n

    @property
    def ended(self) -> bool:
        """Nothing more comes."""
        return self._ended == len(self._answers)

    def take(self, piece: Piece) -> None:
        """InvalidRequest where a response would be too large."""
        answer = self._answers[piece.sample]
        answer.texts.append(piece.text)
        answer.tokens += len(piece.token_ids)
        answer.likelihood += sum(entries[0][1] for entries in piece.logprobs)
        self._bytes += 4 * len(piece.text)
        if self._asked.fields.logprobs is not None and "logprobs" in self._asked.outputs:
            entries = [ranked_entry(each, self._names) for each in piece.logprobs]
            answer.logprobs += entries
            self._bytes += sum(map(len, entries))
        if self._bytes > self._most:
            raise InvalidRequest(
                f"the answer exceeds the {self._most} bytes of a message: ask for a stream, fewer tokens or logprobs",
                field="stopping.max_tokens",
            )
        if piece.finish is not None:
            answer.reason = piece.finish.reason.name.lower()
            self._ended += 1

    def response(self, *, final: bool | None = None) -> pb.ModelInferResponse:
        """What was taken since the last one: perhaps nothing, as a sign of life. `final`: whether it is the last."""
        response = self._head(final)
        values = self._values()
        for name in self._asked.outputs:
            write_output(response, name, values[name], raw=self._asked.raw)
        for answer in self._answers:
            answer.texts, answer.logprobs, answer.tokens = [], [], 0
        self._bytes = 0
        return response

    def end(self) -> pb.ModelInferResponse:
        """The end alone, without tensors."""
        return self._head(final=True)

    def _head(self, final: bool | None) -> pb.ModelInferResponse:
        response = pb.ModelInferResponse(model_name=self._model, model_version=VERSION, id=self._asked.id)
        if final is not None:
            response.parameters[FINAL].bool_param = final
        return response

    def _values(self) -> Mapping[str, Sequence[Any]]:
        answers, outputs = self._answers, self._asked.outputs
        return {
            "text_output": ["".join(answer.texts).encode("utf-8", "replace") for answer in answers],
            "finish_reason": [answer.reason.encode() for answer in answers],
            "cumulative_logprob": [answer.likelihood for answer in answers],
            "logprobs": [self._entries(answer) for answer in answers] if "logprobs" in outputs else (),
            "num_input_tokens": [self._prompt_tokens],
            "num_output_tokens": [answer.tokens for answer in answers],
        }

    def _entries(self, answer: _Answer) -> bytes:
        if self._asked.fields.logprobs is None:
            return b"null"
        return f"[{','.join(answer.logprobs)}]".encode("utf-8", "replace")
