"""From what a caller asked to the complete parameters that workers get."""

import secrets
from collections.abc import Sequence
from dataclasses import fields

from ...engine.check_controls import leaves_nothing
from ...engine.request import SamplingParams
from ...errors import InvalidRequest
from .generation import GenerationRequest, Sampling
from .served_model import ServedModel
from .validation import output_limit

_REQUEST_FIELDS = {
    "prompt_ids": "input",
    "max_tokens": "stopping.max_tokens",
    "min_tokens": "stopping.min_tokens",
    "stop_token_ids": "stopping.token_ids",
    "ignore_eos": "stopping.ignore_eos",
    "samples": "n",
    **{name: name for name in ("sampling", "logprobs", "prompt_logprobs")},
    **{field.name: f"sampling.{field.name}" for field in fields(Sampling)},
}
MAX_PROMPT_ENTRIES = 250_000  # log-probabilities of a prompt: they go in one message, of at most about 3 MB


def complete_params(request: GenerationRequest, prompt_tokens: int, model: ServedModel, most: int) -> SamplingParams:
    """Every default filled in, bad words tokenized, a seed drawn where none was given.

    `most`: prompt and output together that the largest worker takes. InvalidRequest where the request, which was
    validated, does not fit its prompt.
    """
    sampling, stopping = request.sampling, request.stopping
    max_tokens = output_limit(prompt_tokens, stopping.max_tokens, model, most)
    if stopping.min_tokens > max_tokens:
        raise InvalidRequest(
            f"min_tokens is {stopping.min_tokens}; after a prompt of {prompt_tokens} tokens {max_tokens} fit",
            field="stopping.min_tokens",
        )
    check_prompt_logprobs(request.prompt_logprobs, prompt_tokens)
    words = bad_word_tokens(sampling.bad_words, model)
    if leaves_nothing(sampling.allowed_token_ids, sampling.banned_token_ids, words, model.vocabulary_size):
        raise InvalidRequest("every token that may be drawn is banned or a bad word", field="sampling.bad_words")
    return SamplingParams(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        seed=secrets.randbits(64) if sampling.seed is None else sampling.seed,
        max_tokens=max_tokens,
        stop_token_ids=stopping.token_ids,
        ignore_eos=stopping.ignore_eos,
        logprobs=request.logprobs,
        min_p=sampling.min_p,
        typical_p=sampling.typical_p,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias=sampling.logit_bias,
        allowed_token_ids=sampling.allowed_token_ids,
        banned_token_ids=sampling.banned_token_ids,
        bad_words=words,
        min_tokens=stopping.min_tokens,
        prompt_logprobs=request.prompt_logprobs,
        constraint=sampling.constraint,
    )


def request_field(name: str) -> str | None:
    """What the caller calls the field that a worker names; None where the caller has no such field."""
    return _REQUEST_FIELDS.get(name)


def check_prompt_logprobs(top: int | None, prompt_tokens: int) -> None:
    """All of them fit into the first message."""
    if top is not None and (entries := prompt_tokens * (top + 1)) > MAX_PROMPT_ENTRIES:
        raise InvalidRequest(
            f"prompt_logprobs of {prompt_tokens} tokens are {entries} entries, at most {MAX_PROMPT_ENTRIES} are sent",
            field="prompt_logprobs",
        )


def bad_word_tokens(words: Sequence[str], model: ServedModel) -> tuple[tuple[int, ...], ...]:
    """Each word's tokens as it stands alone and after a space, without the special tokens of a prompt."""
    found: dict[tuple[int, ...], None] = {}
    for index, word in enumerate(words):
        bare = word.lstrip(" ") or word
        for text in (bare, " " + bare):
            try:
                ids = model.tokenizer.encode_plain(text)
            except InvalidRequest as error:
                raise InvalidRequest(error.message, field=f"sampling.bad_words[{index}]") from error
            if ids:
                found[tuple(ids)] = None
    return tuple(found)
