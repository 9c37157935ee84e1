"""EngineCore over the fake runner, with the caller's duties done: holds tickets, collects outputs, checks integrity."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from twostroke.engine.config import EngineOptions
from twostroke.engine.core import EngineCore
from twostroke.engine.grammars import Grammars
from twostroke.engine.request import (
    ChunkProgress,
    FinishReason,
    Request,
    Reservation,
    SamplingParams,
    SequenceKey,
    SequenceOutput,
    SequenceTimings,
    StepResult,
    Token,
    Work,
    sample_keys,
)

from .byte_vocabulary import byte_vocabulary
from .fake_runner import FakeRunner, LazyRunner, expected_tokens, next_token

VOCAB = 997
PARAMS = (
    "temperature",
    "top_k",
    "top_p",
    "seed",
    "max_tokens",
    "stop_token_ids",
    "ignore_eos",
    "logprobs",
    "min_tokens",
    "constraint",
)


class Clock:
    """Time that only tests move."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class FakeEngine:
    """A small engine: page size 4 unless told; options as keywords."""

    def __init__(
        self,
        *,
        pages: int = 65,
        context: int = 512,
        eos: frozenset[int] = frozenset(),
        page_size: int = 4,
        lazy: bool = False,
        **options: Any,
    ) -> None:
        """`lazy`: steps overlap."""
        self.options = EngineOptions(page_size=page_size, **{"watermark": 0.0, "reserve": "prompt", **options})
        self.clock = Clock()
        self.eos = eos
        self.context = context
        self.runner = (LazyRunner if lazy else FakeRunner)(pages, page_size, VOCAB)
        self.core = EngineCore(
            self.runner,
            self.options,
            pages=pages,
            context_length=context,
            vocab_size=VOCAB,
            eos_token_ids=eos,
            cache_root=b"fake",
            grammars=Grammars(byte_vocabulary(VOCAB), VOCAB, frozenset({0})),
            clock=self.clock,
        )
        self.requests: dict[SequenceKey, Request] = {}
        self.outputs: dict[SequenceKey, list[int]] = {}
        self.ends: dict[SequenceKey, SequenceOutput] = {}
        self.firsts: dict[SequenceKey, SequenceOutput] = {}
        self.reserved: dict[SequenceKey, Reservation] = {}
        self.preempted: list[SequenceKey] = []
        self.failed: dict[SequenceKey, Exception] = {}
        self.progress: list[tuple[int, ChunkProgress]] = []

    def key(self, request: int) -> SequenceKey:
        return SequenceKey(1, request, 0, 0)

    def add(self, number: int, prompt: list[int], work: Work = Work.ALL, **fields: Any) -> SequenceKey:
        """`fields`: of SamplingParams or of Request."""
        params = SamplingParams(**{name: fields.pop(name) for name in PARAMS if name in fields})
        request = Request(self.key(number), prompt, params, work, **{"arrival": self.clock(), **fields})
        self.core.add(request)
        for key in sample_keys(request.key, request.samples):
            self.requests[key] = replace(request, key=key, samples=1)
        self.requests[request.key] = request
        return request.key

    def take(self, output: SequenceOutput) -> None:
        """Every index comes once and in order; nothing comes after the end."""
        seen = self.outputs.setdefault(output.key, [])
        assert output.key not in self.ends, "output after the end"
        assert output.first_index == len(seen) + len(self.requests[output.key].output_ids)
        assert (output.timings is not None) == (not seen or output.finish is not None)
        seen += [token.token_id for token in output.tokens]
        self.firsts.setdefault(output.key, output)
        if output.finish:
            self.ends[output.key] = output

    def step(self) -> StepResult:
        result = self.core.step(lambda layer, rows: self.progress.extend((layer, row) for row in rows))
        for reservation in result.reserved:
            self.reserved[reservation.key] = reservation
            self.core.pool.hold(("ticket", reservation.key), reservation.pages)
        self.preempted += result.preempted
        self.failed.update(result.failures)
        for output in result.outputs:
            self.take(output)
        self.core.check_integrity()
        return result

    def drain(self, steps: int = 2000) -> int:
        """Steps until nothing goes on any more; returns how many steps that took."""
        for count in range(steps):
            if not self.core.has_work() or not self.step().progress:
                return count
        raise AssertionError("it never ends")

    def run_until(self, condition: Callable[[], bool], steps: int = 500) -> None:
        for _ in range(steps):
            if condition():
                return
            self.step()
        raise AssertionError("it never comes true")

    def known(self, key: SequenceKey) -> list[int]:
        request = self.requests[key]
        return [*request.prompt_ids, *request.output_ids]

    def samples(self, key: SequenceKey) -> list[SequenceKey]:
        """All samples of a request."""
        return sample_keys(key, self.requests[key].samples)

    def write_kv(self, key: SequenceKey) -> Token:
        """The prefill worker's part: fills the reserved pages; returns token 0."""
        reservation, known = self.reserved[key], self.known(key)
        self.runner.fill(reservation.pages, known[reservation.first_position :])
        return Token(next_token(known, VOCAB, key.sample))

    def first_tokens(self, key: SequenceKey, finish: FinishReason | None = None) -> dict[SequenceKey, Any]:
        """Token 0 of each sample, as the prefill worker tells them."""
        known = self.known(key)
        return {each: (Token(next_token(known, VOCAB, each.sample)), finish) for each in self.samples(key)}

    def arrive(
        self, key: SequenceKey, finish: FinishReason | None = None, measured: SequenceTimings | None = None
    ) -> SequenceOutput | None:
        """KV written and verified: the ticket ends, the sequence joins with all its samples. The first one's output."""
        self.write_kv(key)
        self.core.pool.unhold(("ticket", key))
        outputs = self.core.samples_arrived(key, self.first_tokens(key, finish), measured)
        for output in outputs:
            self.take(output)
        self.core.check_integrity()
        return outputs[0] if outputs else None

    def expected(self, key: SequenceKey) -> list[int]:
        """The new tokens that a sequence must have brought when it ended."""
        request, known = self.requests[key], self.known(key)
        stop = frozenset(request.params.stop_token_ids) | (frozenset() if request.params.ignore_eos else self.eos)
        count = 1 if request.work is Work.PREFILL else request.params.max_tokens - len(request.output_ids)
        return expected_tokens(known, count, VOCAB, stop=stop, context=self.context, sample=key.sample)

    def check_outputs(self) -> None:
        """All that ended brought what the pure function says."""
        for key in self.ends:
            assert self.outputs[key] == self.expected(key), key


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """Distinct prompts by seed."""
    return [(seed * 131 + 7 * at + 1) % VOCAB for at in range(length)]
