"""The fields that completions and chats share, and what they mean to the gateway."""

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field

from ....engine.check_controls import MAX_LISTED
from ..generation import Sampling, Stopping
from ..validation import MAX_ANSWERS
from .constraint_fields import ConstraintFields
from .errors import HttpRefusal
from .fields import Fields, Many

MAX_LABEL = 512  # characters of a caller's names for its users
MAX_SALT = 256  # characters

Label = Annotated[str, Field(max_length=MAX_LABEL)]


class StreamOptions(Fields):
    """`stream_options`."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = False


def _one_or_many(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


class GenerationFields(ConstraintFields):
    """Defaults are the API's. Ranges are the gateway's to check: it does so for every door."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        # OpenAI's
        "metadata": ({},),
        "moderation": (),
        "prompt_cache_options": ({}, {"mode": "implicit"}),
        "prompt_cache_retention": ("in_memory",),
        "service_tier": ("auto", "default"),
        "store": (False,),
        # of other servers
        "early_stopping": (False,),
        "guided_decoding_backend": ("auto", "guidance"),
        "guided_whitespace_pattern": (),
        "kv_transfer_params": (),
        "length_penalty": (1.0, 1),
        "logits_processors": ([],),
        "spaces_between_special_tokens": (True,),
        "use_beam_search": (False,),
    }

    remedies: ClassVar[Mapping[str, str]] = {
        "metadata": "nothing is stored that it could be attached to; safety_identifier and x-request-id name a request",
        "store": "nothing is stored here, send false",
    }

    model: str = ""
    # how tokens are drawn
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    logit_bias: Many[dict[str, float]] = Field(default_factory=dict)
    allowed_token_ids: Many[list[int]] = Field(default_factory=list)
    banned_token_ids: Many[list[int]] = Field(default_factory=list)
    bad_words: Many[list[str]] = Field(default_factory=list)
    # when it ends
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: Annotated[Many[list[str]], BeforeValidator(_one_or_many)] = Field(default_factory=list)
    stop_token_ids: Many[list[int]] = Field(default_factory=list)
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    # what is sent
    n: int = Field(1, ge=1, le=MAX_ANSWERS)
    stream: bool = False
    stream_options: dict[str, Any] | None = None
    prompt_logprobs: int | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    skip_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    # who asks
    priority: int = 0
    cache_salt: str = Field("", max_length=MAX_SALT)
    user: Label = ""
    safety_identifier: Label = ""
    prompt_cache_key: Label = ""

    def read_stream_options(self) -> StreamOptions:
        """What a stream tells besides. HttpRefusal for options of a stream without one."""
        if self.stream_options is None:
            return StreamOptions()
        if not self.stream:
            raise HttpRefusal("stream_options take stream: true", field="stream_options")
        return StreamOptions.read(self.stream_options, "stream_options.")

    @property
    def counted(self) -> bool:
        """Whether the prompt's tokens must be known before it runs."""
        told = self.stream_options is not None and bool(self.stream_options.get("continuous_usage_stats"))
        return told or self.return_token_ids or self.truncate_prompt_tokens is not None

    def truncated(self, ids: Sequence[int], most: int) -> list[int]:
        """The last tokens of a prompt, as many as are wanted; `most`: as many as -1 means."""
        wanted = self.truncate_prompt_tokens
        if wanted is None:
            return list(ids)
        if wanted == 0 or wanted < -1:
            raise HttpRefusal("truncate_prompt_tokens takes at least 1, or -1", field="truncate_prompt_tokens")
        return list(ids[-(most if wanted == -1 else wanted) :])

    def check_plain_only(self) -> None:
        """A prompt's log-probabilities are part of a whole answer."""
        if self.stream and self.prompt_logprobs is not None:
            raise HttpRefusal("prompt_logprobs take stream: false", field="prompt_logprobs")

    def sampling(self) -> Sampling:
        """As the gateway wants it. Of lists that are too long only so much is read that it can be told."""
        return Sampling(
            temperature=self.temperature,
            top_k=0 if self.top_k == -1 else self.top_k,  # both say all, one here and one there
            top_p=self.top_p,
            seed=_unsigned(self.seed),
            min_p=self.min_p,
            typical_p=self.typical_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=tuple(_bias(*item) for item in islice(self.logit_bias.items(), MAX_LISTED + 1)),
            allowed_token_ids=tuple(self.allowed_token_ids[: MAX_LISTED + 1]),
            banned_token_ids=tuple(self.banned_token_ids[: MAX_LISTED + 1]),
            constraint=self.constraint(),
            bad_words=tuple(self.bad_words[: MAX_LISTED + 1]),
        )

    def stopping(self, max_tokens: int | None) -> Stopping:
        """`max_tokens`: None where as many as fit are wanted."""
        return Stopping(
            max_tokens=max_tokens,
            strings=tuple(self.stop),
            token_ids=tuple(self.stop_token_ids),
            ignore_eos=self.ignore_eos,
            min_tokens=self.min_tokens,
            include_stop=self.include_stop_str_in_output,
        )


def _unsigned(seed: int | None) -> int | None:
    """The API's seeds have a sign, the gateway's are 64 bits."""
    if seed is None or seed >= 0:
        return seed
    if seed < -(1 << 63):
        raise HttpRefusal("the seed takes 64 bits", field="seed")
    return seed + (1 << 64)


def _bias(key: str, value: float) -> tuple[int, float]:
    """Token ids come as text: they are names in an object."""
    if not (key.isascii() and key.isdecimal() and len(key) <= 10 and str(int(key)) == key):
        raise HttpRefusal(f"logit_bias takes token ids as names, not {key[:16]!r}", field="logit_bias")
    return int(key), value
