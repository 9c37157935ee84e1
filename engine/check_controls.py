"""Ranges of the sampling parameters that go beyond temperature, top-k and top-p."""

from collections.abc import Collection, Sequence
from math import isfinite

from ..errors import InvalidRequest
from .request import SamplingParams

MAX_LOGPROBS = 20
MAX_REPETITION = 100.0
MAX_PENALTY = 10.0
MAX_BIAS = 1000.0
MAX_LISTED = 1024  # biased, allowed, banned tokens, each
MAX_BAD_WORDS = 128  # token sequences: two of each of the public API's 64 texts
MAX_BAD_WORD_TOKENS = 1100  # 256 characters of 4 bytes, a token each, and a space


def check_controls(params: SamplingParams, vocab_size: int) -> None:
    """Raises InvalidRequest, with the field, for what is out of range or contradicts itself."""
    if not 0 <= params.min_p <= 1:  # NaN fails every comparison
        raise InvalidRequest(f"min_p must be in [0, 1], not {params.min_p}", field="min_p")
    if not 0 < params.typical_p <= 1:
        raise InvalidRequest(f"typical_p must be in (0, 1], not {params.typical_p}", field="typical_p")
    if not 0 < params.repetition_penalty <= MAX_REPETITION:
        raise InvalidRequest(
            f"repetition_penalty must be in (0, {MAX_REPETITION:g}], not {params.repetition_penalty}",
            field="repetition_penalty",
        )
    for field, value in (
        ("presence_penalty", params.presence_penalty),
        ("frequency_penalty", params.frequency_penalty),
    ):
        if not -MAX_PENALTY <= value <= MAX_PENALTY:
            raise InvalidRequest(f"{field} must be in [-{MAX_PENALTY:g}, {MAX_PENALTY:g}], not {value}", field=field)
    _check_bias(params, vocab_size)
    _check_ids(params.allowed_token_ids, vocab_size, "allowed_token_ids")
    _check_ids(params.banned_token_ids, vocab_size, "banned_token_ids")
    _check_words(params, vocab_size)
    if not 0 <= params.min_tokens <= params.max_tokens:
        raise InvalidRequest(
            f"min_tokens must be in 0 .. {params.max_tokens}, not {params.min_tokens}", field="min_tokens"
        )
    top = params.prompt_logprobs
    if top is not None and not 0 <= top <= MAX_LOGPROBS:
        raise InvalidRequest(f"prompt_logprobs must be in 0 .. {MAX_LOGPROBS}, not {top}", field="prompt_logprobs")
    if leaves_nothing(params.allowed_token_ids, params.banned_token_ids, params.bad_words, vocab_size):
        raise InvalidRequest("every allowed token is banned", field="allowed_token_ids")


def leaves_nothing(
    allowed: Sequence[int], banned: Sequence[int], words: Sequence[Sequence[int]], vocab_size: int
) -> bool:
    """Whether bans, bad words of one token counted in, cover all that may be drawn; so at every position."""
    never = {*banned, *(word[0] for word in words if len(word) == 1)}
    return not set(allowed) - never if allowed else len(never) >= vocab_size


def _check_bias(params: SamplingParams, vocab_size: int) -> None:
    bias = params.logit_bias
    _check_ids([token for token, _ in bias], vocab_size, "logit_bias")
    if len({token for token, _ in bias}) != len(bias):
        raise InvalidRequest("a token is biased twice", field="logit_bias")
    for _, value in bias:
        if not (isfinite(value) and abs(value) <= MAX_BIAS):
            raise InvalidRequest(f"a bias must be in [-{MAX_BIAS:g}, {MAX_BIAS:g}], not {value}", field="logit_bias")


def _check_words(params: SamplingParams, vocab_size: int) -> None:
    words = params.bad_words
    if len(words) > MAX_BAD_WORDS:
        raise InvalidRequest(f"at most {MAX_BAD_WORDS} bad words are taken", field="bad_words")
    for word in words:
        if not word:
            raise InvalidRequest("a bad word has no tokens", field="bad_words")
        _check_ids(word, vocab_size, "bad_words", MAX_BAD_WORD_TOKENS)


def _check_ids(ids: Collection[int], vocab_size: int, field: str, most: int = MAX_LISTED) -> None:
    if len(ids) > most:
        raise InvalidRequest(f"at most {most} tokens are taken, not {len(ids)}", field=field)
    if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
        raise InvalidRequest(f"token ids must be in 0 .. {vocab_size - 1}", field=field)
