"""What a sequence's parameters do to its logits before a token is drawn, kept in step with its tokens."""

from array import array
from collections.abc import Collection, Iterable, Sequence
from itertools import chain, islice

import torch
from torch import Tensor

from ..kernels.logit_masks import add_bias_, allow_only_, forbid_
from ..kernels.penalties import penalize_
from .request import SamplingParams


class LogitRules:
    """Derived from the tokens alone, so that it is right after a replay or a recomputation; O(1) a new token."""

    def __init__(self, params: SamplingParams, prompt_length: int) -> None:
        """`prompt_length`: that many of the tokens are prompt, the others output."""
        self.params = params
        self._prompt_length = prompt_length
        self._repeats = params.repetition_penalty != 1.0
        self.penalizes = self._repeats or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
        self._seen = 0 if self._repeats else prompt_length  # tokens that are counted already
        self._output = 0
        self._places: dict[int, int] = {}
        self.ids = array("q")  # distinct tokens of prompt (where it matters) and output, by first occurrence
        self.counts = array("q")  # how often each occurs in the output
        self.bias_ids = array("q", [token for token, _ in params.logit_bias])
        self.bias = array("f", [value for _, value in params.logit_bias])
        self.allowed = array("q", params.allowed_token_ids)
        self._never = array("q", chain(params.banned_token_ids, single_tokens(params.bad_words)))
        self._words: dict[int, list[tuple[int, ...]]] = {}  # by their last token but one
        for word in params.bad_words:
            if len(word) > 1:
                self._words.setdefault(word[-2], []).append(word)
        self._completing: list[int] = []

    @staticmethod
    def needed(params: SamplingParams) -> bool:
        """Whether anything is to be done at all. Under a constraint `min_tokens` is kept by `Matching`."""
        return bool(
            params.repetition_penalty != 1.0
            or params.presence_penalty
            or params.frequency_penalty
            or (params.min_tokens and params.constraint is None)
            or params.logit_bias
            or params.allowed_token_ids
            or params.banned_token_ids
            or params.bad_words
        )

    def update(self, tokens: list[int]) -> None:
        """`tokens`: prompt and output so far; what was there at the last call has not changed."""
        self._output = len(tokens) - self._prompt_length
        if self.penalizes:
            for position, token in enumerate(islice(tokens, self._seen, None), self._seen):
                self._count(token, position >= self._prompt_length)
            self._seen = max(self._seen, len(tokens))
        if self._words:
            self._completing = [word[-1] for word in self._words.get(tokens[-1], ()) if ends_with(tokens, word[:-1])]

    def _count(self, token: int, in_output: bool) -> None:
        place = self._places.setdefault(token, len(self.ids))
        if place == len(self.ids):
            self.ids.append(token)
            self.counts.append(0)
        self.counts[place] += in_output

    def banned(self, end_ids: Collection[int]) -> "array[int]":
        """Tokens that must not be the next one. `end_ids`: the model's own ends of text."""
        banned = self._never + array("q", self._completing)
        if self._output < self.params.min_tokens and self.params.constraint is None:
            banned.extend(self.params.stop_token_ids)
            if not self.params.ignore_eos:
                banned.extend(end_ids)
        return banned


def single_tokens(words: Iterable[tuple[int, ...]]) -> list[int]:
    """Of bad words: those that are one token, and so are banned everywhere."""
    return [word[0] for word in words if len(word) == 1]


def ends_with(tokens: list[int], end: tuple[int, ...]) -> bool:
    """Whether `tokens` ends with `end`, which is not empty."""
    return len(tokens) >= len(end) and tuple(tokens[-len(end) :]) == end


def apply_rules_(logits: Tensor, rules: Sequence[LogitRules], end_ids: Collection[int]) -> None:
    """In place, row by row: penalties, then bias, then what may not be drawn becomes -inf.

    `logits`: float32 [rows, vocab]; `rules`: of each row; `end_ids`: the model's own ends of text. Each kind of rule is
    one operation for all rows that have it.
    """
    penalized = [i for i, rule in enumerate(rules) if rule.penalizes and rule.ids]
    if penalized:
        params = [rule.params for rule in rules]
        penalize_(
            logits,
            _rows(penalized, [len(rules[i].ids) for i in penalized], logits),
            _joined([rules[i].ids for i in penalized], logits),
            _joined([rules[i].counts for i in penalized], logits),
            repetition=_column([p.repetition_penalty for p in params], logits),
            presence=_column([p.presence_penalty for p in params], logits),
            frequency=_column([p.frequency_penalty for p in params], logits),
        )
    biased = [i for i, rule in enumerate(rules) if rule.bias_ids]
    if biased:
        ids, values = [rules[i].bias_ids for i in biased], [rules[i].bias for i in biased]
        add_bias_(logits, _rows(biased, map(len, ids), logits), _joined(ids, logits), _joined(values, logits))
    limited = [i for i, rule in enumerate(rules) if rule.allowed]
    if limited:
        ids = [rules[i].allowed for i in limited]
        allow_only_(logits, _rows(limited, map(len, ids), logits), _joined(ids, logits))
    banned = {i: tokens for i, rule in enumerate(rules) if (tokens := rule.banned(end_ids))}
    if banned:
        ids = list(banned.values())
        forbid_(logits, _rows(list(banned), map(len, ids), logits), _joined(ids, logits))


def _rows(rows: list[int], counts: Iterable[int], like: Tensor) -> Tensor:
    """Each of `rows`, as many times as `counts` says."""
    return torch.tensor(rows, device=like.device).repeat_interleave(torch.tensor(list(counts), device=like.device))


def _joined(parts: "Sequence[array[int]] | Sequence[array[float]]", like: Tensor) -> Tensor:
    """The parts, none of them empty, one after another: int64 or float32, as they are."""
    dtype = torch.float32 if parts[0].typecode == "f" else torch.int64
    return torch.frombuffer(bytearray().join(parts), dtype=dtype).to(like.device)


def _column(values: list[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=like.device)
