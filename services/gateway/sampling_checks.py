"""Refuses sampling parameters that are out of range or contradict each other, with the path of the field."""

from collections.abc import Sequence

from ...engine.check_controls import MAX_BIAS, MAX_LISTED, MAX_PENALTY, MAX_REPETITION, leaves_nothing
from ...errors import InvalidRequest
from .generation import Sampling

MAX_TEMPERATURE = 100.0
MAX_TOP_K = 1 << 31
MAX_BAD_WORDS = 64
MAX_BAD_WORD_CHARACTERS = 256


def check_sampling(sampling: Sampling, vocabulary: int) -> None:
    """Finite and in range; token ids below `vocabulary`; something left to draw."""
    _check_ranges(sampling)
    if sampling.seed is not None and not 0 <= sampling.seed < 1 << 64:
        raise InvalidRequest("the seed takes 64 bits", field="sampling.seed")
    _check_bias(sampling.logit_bias, vocabulary)
    _check_ids(sampling.allowed_token_ids, vocabulary, "sampling.allowed_token_ids")
    _check_ids(sampling.banned_token_ids, vocabulary, "sampling.banned_token_ids")
    if leaves_nothing(sampling.allowed_token_ids, sampling.banned_token_ids, (), vocabulary):
        raise InvalidRequest("every token that may be drawn is banned", field="sampling.banned_token_ids")
    if len(sampling.bad_words) > MAX_BAD_WORDS:
        raise InvalidRequest(f"more than {MAX_BAD_WORDS} bad words", field="sampling.bad_words")
    for index, word in enumerate(sampling.bad_words):
        if not 1 <= len(word) <= MAX_BAD_WORD_CHARACTERS:
            raise InvalidRequest(
                f"a bad word has {len(word)} characters; it takes 1 to {MAX_BAD_WORD_CHARACTERS}",
                field=f"sampling.bad_words[{index}]",
            )


def _check_ranges(sampling: Sampling) -> None:
    """NaN fails every comparison."""
    limits = (
        ("temperature", sampling.temperature, 0.0, MAX_TEMPERATURE),
        ("min_p", sampling.min_p, 0.0, 1.0),
        ("presence_penalty", sampling.presence_penalty, -MAX_PENALTY, MAX_PENALTY),
        ("frequency_penalty", sampling.frequency_penalty, -MAX_PENALTY, MAX_PENALTY),
    )
    for name, value, least, most in limits:
        if not least <= value <= most:
            raise InvalidRequest(f"{name} is {value:g}; it takes {least:g} to {most:g}", field=f"sampling.{name}")
    positive = (
        ("top_p", sampling.top_p, 1.0),
        ("typical_p", sampling.typical_p, 1.0),
        ("repetition_penalty", sampling.repetition_penalty, MAX_REPETITION),
    )
    for name, value, most in positive:
        if not 0 < value <= most:
            raise InvalidRequest(f"{name} is {value:g}; it takes more than 0, up to {most:g}", field=f"sampling.{name}")
    if not 0 <= sampling.top_k < MAX_TOP_K:
        raise InvalidRequest(f"top_k is {sampling.top_k}; it takes 0 to {MAX_TOP_K - 1}", field="sampling.top_k")


def _check_bias(bias: Sequence[tuple[int, float]], vocabulary: int) -> None:
    if len(bias) > MAX_LISTED:
        raise InvalidRequest(f"more than {MAX_LISTED} biased tokens", field="sampling.logit_bias")
    for token, value in bias:
        field = f"sampling.logit_bias[{token}]"
        _check_id(token, vocabulary, field)
        if not -MAX_BIAS <= value <= MAX_BIAS:
            raise InvalidRequest(f"a bias is {value:g}; it takes {-MAX_BIAS:g} to {MAX_BIAS:g}", field=field)


def _check_ids(ids: Sequence[int], vocabulary: int, field: str) -> None:
    if len(ids) > MAX_LISTED:
        raise InvalidRequest(f"more than {MAX_LISTED} tokens", field=field)
    for index, token in enumerate(ids):
        _check_id(token, vocabulary, f"{field}[{index}]")


def _check_id(token: int, vocabulary: int, field: str) -> None:
    if not 0 <= token < vocabulary:
        raise InvalidRequest(f"token id {token} is outside the vocabulary of {vocabulary}", field=field)
