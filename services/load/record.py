"""What the client saw of one request of a load, by its own monotonic clock."""

from array import array
from dataclasses import dataclass, field
from typing import Any

from ...v1 import inference_pb2 as pb

OK = "OK"
CANCELLED = "CANCELLED_HERE"  # the run was ended while it ran
NOT_SENT = "NOT_SENT"  # more are in flight than the client is to hold
NO_FINISH = "NO_FINISH"  # the stream ended well but without its last message
BAD_INDEX = "BAD_INDEX"  # a token was missing or came twice


@dataclass(slots=True)
class Record:
    """Times are seconds of `time.monotonic`."""

    index: int
    scheduled: float | None = None  # when it was to be sent; None: as soon as there was room
    sent: float = 0.0
    first: float = 0.0  # when token 0 came
    last: float = 0.0  # when the last token came
    ended: float = 0.0  # when the last message came, or the error
    tokens: int = 0
    gaps: "array[float]" = field(default_factory=lambda: array("d"))  # before tokens 1, 2, ...
    status: str = ""  # a gRPC status, or one of this file's words
    message: str = ""
    cut: bool = False
    finish: pb.Finish | None = None

    def take(self, piece: pb.GenerateResponse, now: float) -> None:
        """A message came. Tokens that come in one message have gaps of 0 between them: so the client sees them."""
        count = len(piece.token_ids)
        if count:
            if piece.first_index != self.tokens:
                self.status = BAD_INDEX
            if self.tokens:
                self.gaps.append(now - self.last)
            else:
                self.first = now
            if count > 1:
                self.gaps.extend([0.0] * (count - 1))
            self.last = now
            self.tokens += count
        if piece.HasField("finish"):
            self.finish = piece.finish

    def end(self, status: str, now: float, message: str = "") -> None:
        """It is over. A stream that contradicts itself is a failure whatever its status."""
        self.ended = now
        if status == OK and self.finish is None:
            status = NO_FINISH
        if status != OK or not self.status:
            self.status, self.message = status, message

    @property
    def ttft(self) -> float | None:
        """Time to first token: from sending to token 0."""
        return self.first - self.sent if self.tokens else None

    @property
    def gap01(self) -> float | None:
        """From token 0 to token 1."""
        return self.gaps[0] if self.gaps else None

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first: (last - first) / (tokens - 1)."""
        return (self.last - self.first) / (self.tokens - 1) if self.tokens > 1 else None

    @property
    def end_to_end(self) -> float:
        """From sending to the end."""
        return self.ended - self.sent

    @property
    def lateness(self) -> float | None:
        """How much later than planned the client sent it."""
        return None if self.scheduled is None else self.sent - self.scheduled

    def as_dict(self, start: float) -> dict[str, Any]:
        """For a result file: milliseconds; `sent_ms` counts from `start`. No text, no ids."""

        def ms(seconds: float | None) -> float | None:
            return None if seconds is None else round(seconds * 1e3, 3)

        line: dict[str, Any] = {"index": self.index, "status": self.status, "sent_ms": ms(self.sent - start)}
        line |= {"lateness_ms": ms(self.lateness), "ttft_ms": ms(self.ttft), "gap01_ms": ms(self.gap01)}
        line |= {"itl_max_ms": ms(max(self.gaps[1:], default=None)), "tpot_ms": ms(self.tpot)}
        line |= {"e2e_ms": ms(self.end_to_end), "output_tokens": self.tokens}
        if self.finish is not None:
            usage, spent = self.finish.usage, self.finish.timings
            line |= {"prompt_tokens": usage.prompt_tokens, "cached_tokens": usage.cached_tokens}
            line |= {"queue_ms": spent.queue_us / 1e3, "prefill_ms": spent.prefill_us / 1e3}
            line |= {"transfer_ms": spent.transfer_us / 1e3}
            line |= {"prefill_worker": self.finish.prefill_worker, "decode_worker": self.finish.decode_worker}
        return line
