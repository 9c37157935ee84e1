"""What a door asks of the gateway and what it gets: plain data, whatever protocol the door speaks."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from ...engine.chat_template import PLAIN, ChatOptions
from ...engine.request import Constraint, FinishReason, PromptLogprobs
from ..security.tenant import Tenant, current_tenant


@dataclass(frozen=True, slots=True)
class TextInput:
    """Plain text, tokenized as the model's tokenizer does."""

    text: str
    add_special_tokens: bool = True  # those that the tokenizer adds


@dataclass(frozen=True, slots=True)
class TokenInput:
    """Token ids, taken as they are."""

    ids: Sequence[int]  # of a message still: there may be millions, which are counted before anything is made of them


@dataclass(frozen=True, slots=True)
class Turn:
    """A message of a conversation. `more`: its other members, as chat templates know them (`tool_calls`, `name`)."""

    role: str
    content: str = ""
    more: Mapping[str, Any] = field(default_factory=dict)

    def message(self) -> dict[str, Any]:
        """As the template takes it."""
        return {"role": self.role, "content": self.content, **self.more}


@dataclass(frozen=True, slots=True)
class ChatInput:
    """Turns, oldest first; put through the model's chat template."""

    messages: tuple[Turn, ...]
    options: ChatOptions = PLAIN


Input: TypeAlias = TextInput | TokenInput | ChatInput


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn; None: the gateway draws a seed."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    banned_token_ids: tuple[int, ...] = ()
    bad_words: tuple[str, ...] = ()
    constraint: Constraint | None = None


@dataclass(frozen=True, slots=True)
class Stopping:
    """When generation ends; `max_tokens` None: as many as fit."""

    max_tokens: int | None = None
    strings: tuple[str, ...] = ()
    token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    include_stop: bool = False


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A request as it came through a door, not yet validated."""

    input: Input | None
    model: str = ""
    sampling: Sampling = field(default_factory=Sampling)
    stopping: Stopping = field(default_factory=Stopping)
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    n: int = 1  # independent answers
    skip_special_tokens: bool = True  # they are no text
    shown_tokens: tuple[str, ...] = ()  # names of special tokens that are text all the same
    request_id: str = ""
    timeout_s: float | None = None  # left until the caller's deadline, at arrival
    traceparent: str = ""
    priority: int = 0  # lower ones go first
    cache_salt: bytes = b""  # the caller's wish; the tenant's own goes in before it is used
    tenant: Tenant = field(default_factory=current_tenant)


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds; each as `twostroke.v1.Timings` describes it. 0: it did not happen."""

    queue: float = 0.0
    prefill: float = 0.0
    transfer: float = 0.0
    first_token: float = 0.0
    decode: float = 0.0
    total: float = 0.0
    gap01: float = 0.0


@dataclass(frozen=True, slots=True)
class Finish:
    """The end of a generation."""

    reason: FinishReason
    stop_string: str
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    timings: Timings
    seed: int
    prefill_worker: str
    decode_worker: str
    replays: int = 0
    route: str = ""  # why these workers, for people


@dataclass(slots=True)  # not frozen: there is one for each token, and that would double its making
class Piece:
    """A piece of the answer. `logprobs`: for each token (token, natural log-probability), the chosen one first; empty
    unless asked for. `finish` is in the last piece, and only there."""

    first_index: int
    token_ids: list[int]
    text: str
    logprobs: list[tuple[tuple[int, float], ...]]
    finish: Finish | None = None
    sample: int = 0  # which answer it belongs to; `finish` ends that one
    prompt_logprobs: PromptLogprobs | None = None  # in the first piece, where they were asked for
    cached_tokens: int = 0  # of the prompt, which a worker had cached


Send: TypeAlias = Callable[[Piece], Awaitable[None]]
"""Hands a piece to the caller; returns once the caller's transport took it."""
