"""What the engine is asked and what it answers: plain data, no tensors."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import repeat
from typing import NamedTuple


class Work(IntEnum):
    """The part of a request that this engine does (values equal the worker API's)."""

    ALL = 1
    PREFILL = 2
    DECODE = 3


class FinishReason(IntEnum):
    """Why a sequence ended (values equal the public API's)."""

    STOP = 1
    LENGTH = 2


class SequenceKey(NamedTuple):
    """Names a sequence across processes."""

    gateway: int
    request: int
    sample: int
    attempt: int


def sample_keys(key: SequenceKey, samples: int) -> list[SequenceKey]:
    """The names of `samples` samples, `key` being the first one's."""
    return [key._replace(sample=key.sample + index) for index in range(samples)]


class ConstraintKind(IntEnum):
    """The language in which a `Constraint` is written (values equal the worker API's)."""

    JSON_OBJECT = 1
    JSON_SCHEMA = 2
    REGEX = 3
    CHOICE = 4
    GRAMMAR = 5


@dataclass(frozen=True, slots=True)
class Constraint:
    """What an output must be, whole: at each index only tokens with which it still can are drawn.

    `text`: of JSON_SCHEMA the schema as JSON; of CHOICE a JSON array of texts; of GRAMMAR Lark as llguidance reads it;
    of JSON_OBJECT nothing.
    """

    kind: ConstraintKind
    text: str = ""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to draw and when to stop; complete, validated by the gateway and again by `EngineCore.add`."""

    temperature: float = 1.0  # 0 is greedy
    top_k: int = 0  # 0 keeps all
    top_p: float = 1.0
    seed: int = 0  # 64-bit key of the noise
    max_tokens: int = 16  # output tokens, those of `Request.output_ids` counted in
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None  # None: none; k: the chosen token's and the top k's
    min_p: float = 0.0  # 0 keeps all
    typical_p: float = 1.0  # 1 keeps all
    repetition_penalty: float = 1.0  # over prompt and output
    presence_penalty: float = 0.0  # over the output
    frequency_penalty: float = 0.0  # over the output
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token, added to its logit)
    allowed_token_ids: tuple[int, ...] = ()  # empty: all
    banned_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()  # token sequences that are never completed
    min_tokens: int = 0  # output tokens before which end and stop tokens are not drawn
    prompt_logprobs: int | None = None  # as `logprobs`, of the prompt's tokens from the second on
    constraint: Constraint | None = None  # on the output; not on what comes after its end with `ignore_eos`


@dataclass(slots=True)
class Request:
    """A sequence to run. A replay is the same with the output so far in `output_ids`."""

    key: SequenceKey
    prompt_ids: list[int]
    params: SamplingParams
    work: Work = Work.ALL
    output_ids: list[int] = field(default_factory=list)
    arrival: float = 0.0  # time.monotonic(), of the first arrival
    deadline: float | None = None  # time.monotonic()
    cache_salt: bytes = b""
    start_now: bool = True  # PREFILL: start before the ticket comes
    writer: int = 0  # DECODE: incarnation of the prefill worker that will write the KV
    samples: int = 1  # answers to draw, `key.sample` being the first; more than 1 only without `output_ids`
    priority: int = 0  # lower ones go first


NO_TOKEN = -1


class Token(NamedTuple):
    """A sampled token; `logprobs` holds (token, natural log-probability): the chosen one, then the top ones.

    `token_id` is NO_TOKEN where the parameters (bans, allowed tokens, bad words, `min_tokens`) leave none to draw.
    """

    token_id: int
    logprobs: tuple[tuple[int, float], ...] = ()


def plain_tokens(ids: Sequence[int]) -> list[Token]:
    """Tokens without log-probabilities; made in one go, which takes a third of the time: a step may have hundreds."""
    return list(map(tuple.__new__, repeat(Token), zip(ids, repeat(()))))


@dataclass(slots=True)
class PromptLogprobs:
    """Natural log-probabilities of a stretch of a prompt, flat: of each of its tokens its own, then the top ones."""

    first_position: int  # of the first token told of, at least 1
    counts: Sequence[int]  # entries of each token
    ids: Sequence[int]
    values: Sequence[float]


@dataclass(slots=True)
class SequenceTimings:
    """Seconds, by this worker's monotonic clock; 0: it did not happen.

    Once the KV of a DECODE sequence arrived, all but `transfer` is what its prefill worker measured.
    """

    queue: float = 0.0  # arrival to first chunk
    prefill: float = 0.0  # first chunk to first token
    transfer: float = 0.0  # reservation to acceptance
    cached_tokens: int = 0  # prompt tokens found in the prefix cache


@dataclass(slots=True)
class SequenceOutput:
    """New tokens of one sequence in one step."""

    key: SequenceKey
    first_index: int  # output index of tokens[0]
    tokens: list[Token]
    finish: FinishReason | None
    timings: SequenceTimings | None  # with the first and the last tokens
    prompt_logprobs: PromptLogprobs | None = None  # then `tokens` is empty; stretches come in order, before token 0


@dataclass(slots=True)
class Reservation:
    """Pages set aside for a DECODE sequence's KV: the ones that must be written, in the prompt's order."""

    key: SequenceKey
    writer: int
    pages: list[int]
    first_position: int  # prompt position of pages[0]'s first token; a multiple of the page size


@dataclass(slots=True)
class StepResult:
    """All that one `EngineCore.step` brought about."""

    outputs: list[SequenceOutput] = field(default_factory=list)
    reserved: list[Reservation] = field(default_factory=list)
    failures: list[tuple[SequenceKey, Exception]] = field(default_factory=list)  # dropped by the engine, pages returned
    progress: bool = False  # something ran, was reserved, failed or gave way: another step may find work at once
    preempted: list[SequenceKey] = field(default_factory=list)  # lost their pages: what a hook was told is void
    prefilled: list[SequenceKey] = field(default_factory=list)  # PREFILL sequences: the last chunk is computed now
    step: int = 0  # counted by whoever drives the engine


class ChunkProgress(NamedTuple):
    """What the layer hook learns of a PREFILL sequence: positions below `ready` are written in this layer."""

    key: SequenceKey
    pages: list[int]  # the prompt's whole block table
    ready: int  # tokens, cached prefix and this step's chunk counted in
    total: int  # tokens to be written in all (prompt + replayed output)
