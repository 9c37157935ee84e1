"""Every sampling control as its definition says, one row at a time, in numpy."""

from collections.abc import Collection, Sequence

import numpy as np

from twostroke.engine.request import SamplingParams


def plain_logits(
    row: np.ndarray, params: SamplingParams, prompt: Sequence[int], output: Sequence[int], end_ids: Collection[int]
) -> np.ndarray:
    """Penalties, bias, bans: float64 logits, -inf for what may not be drawn."""
    logits = row.astype(np.float64)
    for token in {*prompt, *output}:
        r = params.repetition_penalty
        logits[token] = logits[token] / r if logits[token] > 0 else logits[token] * r
    for token in set(output):
        logits[token] -= params.presence_penalty + params.frequency_penalty * list(output).count(token)
    for token, bias in params.logit_bias:
        logits[token] += bias
    text = [*prompt, *output]
    for token in range(len(row)):
        banned = token in params.banned_token_ids
        banned |= bool(params.allowed_token_ids) and token not in params.allowed_token_ids
        for word in params.bad_words:
            banned |= token == word[-1] and text[len(text) - len(word) + 1 :] == list(word[:-1])
        ends = token in params.stop_token_ids or (token in end_ids and not params.ignore_eos)
        banned |= ends and len(output) < params.min_tokens
        if banned:
            logits[token] = -np.inf
    return logits


def plain_distribution(
    row: np.ndarray, params: SamplingParams, prompt: Sequence[int], output: Sequence[int], end_ids: Collection[int]
) -> np.ndarray:
    """The probability of each token: temperature, top-k, top-p, min-p, typical-p, in this order."""
    logits = plain_logits(row, params, prompt, output, end_ids)
    if params.temperature == 0:
        return np.eye(len(row))[np.argmax(logits)]
    p = _normalized(np.exp((logits - logits.max()) / params.temperature))
    order = np.argsort(-p, kind="stable")
    if params.top_k:
        p[order[params.top_k :]] = 0.0
        p = _normalized(p)
    if params.top_p < 1:
        before = np.cumsum(p[order]) - p[order]
        p[order[before >= params.top_p]] = 0.0
        p = _normalized(p)
    p[p < params.min_p * p.max()] = 0.0
    p = _normalized(p)
    if params.typical_p < 1:
        possible = np.flatnonzero(p)
        surprise = -np.log(p[possible])
        distance = np.abs(surprise - (p[possible] * surprise).sum())
        near = possible[np.argsort(distance, kind="stable")]
        before = np.cumsum(p[near]) - p[near]
        p[near[before >= params.typical_p]] = 0.0
    return _normalized(p)


def _normalized(p: np.ndarray) -> np.ndarray:
    return p / p.sum()
