"""The sum of a load: samples of every measure, tokens, errors by status."""

import math
from collections import Counter
from dataclasses import dataclass, field

from .record import CANCELLED, OK, Record
from .statistics import Sample


@dataclass(slots=True)
class Tally:
    """Grows with each request that ends. Times, tokens and rates are those of requests that succeeded."""

    ttft: Sample = field(default_factory=Sample)
    gap01: Sample = field(default_factory=Sample)
    itl: Sample = field(default_factory=Sample)  # every gap but that between tokens 0 and 1
    tpot: Sample = field(default_factory=Sample)
    end_to_end: Sample = field(default_factory=Sample)
    lateness: Sample = field(default_factory=Sample)  # of everything that was sent by plan
    sent: int = 0
    succeeded: int = 0
    cancelled: int = 0  # by the end of the run: neither successes nor errors
    cut: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    messages: dict[str, str] = field(default_factory=dict)  # the first one of each status
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    began: float = math.inf  # when the first request was sent
    ended: float = 0.0  # when the last one that counts ended
    complete: bool = True

    def sending(self, record: Record) -> None:
        """A request leaves now."""
        self.sent += 1
        self.began = min(self.began, record.sent)
        if record.lateness is not None:
            self.lateness.add(record.lateness)

    def add(self, record: Record) -> None:
        """A request has ended, or was not even sent."""
        if record.status == CANCELLED:
            self.cancelled += 1
            return
        self.cut += record.cut
        self.ended = max(self.ended, record.ended)
        if record.status != OK:
            self.errors[record.status] += 1
            self.messages.setdefault(record.status, record.message)
            return
        self.succeeded += 1
        samples = (self.ttft, record.ttft), (self.gap01, record.gap01), (self.tpot, record.tpot)
        for sample, value in (*samples, (self.end_to_end, record.end_to_end)):
            if value is not None:
                sample.add(value)
        for gap in record.gaps[1:]:
            self.itl.add(gap)
        self.output_tokens += record.tokens
        if record.finish is not None:
            self.input_tokens += record.finish.usage.prompt_tokens
            self.cached_tokens += record.finish.usage.cached_tokens

    @property
    def failed(self) -> int:
        """Requests that ended in an error."""
        return sum(self.errors.values())

    @property
    def error_rate(self) -> float:
        """Of all that ended by themselves; 0 where none did."""
        ended = self.succeeded + self.failed
        return self.failed / ended if ended else 0.0

    @property
    def seconds(self) -> float:
        """From the first sending to the last end."""
        return max(0.0, self.ended - self.began)

    def a_second(self, count: int) -> float:
        """`count` by that time."""
        return count / self.seconds if self.seconds else 0.0

    @property
    def cached_share(self) -> float:
        """Of the prompts' tokens, those that were found in a cache."""
        return self.cached_tokens / self.input_tokens if self.input_tokens else 0.0
