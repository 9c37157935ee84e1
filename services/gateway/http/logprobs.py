"""Log-probabilities as the API shows them, as pieces of JSON: in chats, in completions, and of prompts."""

import codecs
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, TypeAlias

from ....engine.request import PromptLogprobs
from ..served_model import ServedModel

Entries: TypeAlias = Sequence[tuple[int, float]]
"""(token, natural log-probability): the chosen one first, then the most likely ones."""

LEAST = -9999.0  # JSON knows no infinity
to_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode


def number(value: float) -> float | None:
    """As JSON can say it."""
    return None if math.isnan(value) else max(value, LEAST)


class TokenNames:
    """What tokens are called: by their text, or `token_id:N`."""

    def __init__(self, model: ServedModel, *, as_ids: bool, skip_special: bool = True) -> None:
        self._tokenizer = model.tokenizer
        self._hidden = frozenset(model.special_token_ids if skip_special else ())
        self._as_ids = as_ids

    def __call__(self, token: int) -> str:
        """U+FFFD where the text is a part of a character."""
        return f"token_id:{token}" if self._as_ids else self._tokenizer.token_text(token)

    def raw(self, token: int) -> bytes:
        """The token's bytes."""
        return self._tokenizer.token_bytes(token)

    def shown(self, token: int) -> bytes:
        """Its share of an answer's text: none of a special token's, unless they are asked for."""
        return b"" if token in self._hidden else self.raw(token)


def chat_entry(entries: Entries, names: TokenNames) -> str:
    """An element of a choice's `logprobs.content`."""
    chosen, *top = entries
    told = _chat_token(chosen, names)
    told["top_logprobs"] = [_chat_token(entry, names) for entry in top]
    return to_json(told)


def _chat_token(entry: tuple[int, float], names: TokenNames) -> dict[str, Any]:
    token, value = entry
    return {"token": names(token), "logprob": number(value), "bytes": list(names.raw(token))}


@dataclass(slots=True)
class CompletionLogprobs:
    """Four lists of a completion's `logprobs`, an element a token."""

    tokens: list[str] = field(default_factory=list)
    token_logprobs: list[str] = field(default_factory=list)
    top_logprobs: list[str] = field(default_factory=list)
    text_offset: list[str] = field(default_factory=list)

    def json(self) -> str:
        """All of it."""
        lists = (
            f'"{name}":[{",".join(getattr(self, name))}]'
            for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        )
        return "{" + ",".join(lists) + "}"

    def size(self) -> int:
        """Characters of the largest part."""
        return sum(map(len, self.top_logprobs))

    def extend(self, other: "CompletionLogprobs") -> None:
        """Joins on."""
        self.tokens += other.tokens
        self.token_logprobs += other.token_logprobs
        self.top_logprobs += other.top_logprobs
        self.text_offset += other.text_offset


class Offsets:
    """Where each token begins in the text of a choice, in characters."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._at = 0

    def take(self, shown: bytes) -> int:
        """The next token's place. A character of several tokens is counted with the last of them."""
        at = self._at
        self._at += len(self._decoder.decode(shown))
        return at


def completion_entry(
    told: CompletionLogprobs, token: int, entries: Entries, names: TokenNames, offsets: Offsets
) -> None:
    """Adds a token to `told`; without entries it has none: nothing came before a prompt's first token."""
    told.tokens.append(to_json(names(token)))
    told.text_offset.append(str(offsets.take(names.shown(token))))
    if not entries:
        told.token_logprobs.append("null")
        told.top_logprobs.append("null")
        return
    chosen, *top = entries
    told.token_logprobs.append(to_json(number(chosen[1])))
    values: dict[str, float | None] = {}
    for other, value in (*top, chosen):
        values.setdefault(names(other), number(value))  # of several that look alike, the likeliest
    told.top_logprobs.append(to_json(values))


def prompt_positions(scores: PromptLogprobs) -> Iterator[Entries]:
    """Of each token of a prompt from the second on."""
    entries = zip(scores.ids, scores.values, strict=True)
    return (tuple(islice(entries, count)) for count in scores.counts)


def prompt_entries(scores: PromptLogprobs, names: TokenNames) -> str:
    """`prompt_logprobs`: null for the first token, then an object a token, by token id."""
    told = ["null", *(ranked_entry(entries, names) for entries in prompt_positions(scores))]
    return "[" + ",".join(told) + "]"


def ranked_entry(entries: Entries, names: TokenNames) -> str:
    """An object of a token and its rivals by their ids; a token that was none of the likeliest has no rank."""
    chosen, *top = entries
    ranks = {token: rank for rank, (token, _) in enumerate(top, 1)}
    values = dict((chosen, *top))
    return to_json(
        {
            str(token): {"logprob": number(value), "rank": ranks.get(token), "decoded_token": names(token)}
            for token, value in values.items()
        }
    )
