"""From a step's logits to tokens, each row by its own parameters.

The order of processing, which every part keeps to:

1. log-probabilities are taken of the model's own logits, before anything else;
2. repetition penalty, presence penalty, frequency penalty (`kernels/penalties.py`);
3. logit bias;
4. what may not be drawn goes: all but the allowed tokens, banned tokens, tokens that complete a bad word, and before
   `min_tokens` the tokens that end the output (`engine/logit_rules.py`); and under a constraint the tokens that it does
   not allow next (`engine/matching.py`). Nothing left: NO_TOKEN;
5. temperature; 0 takes the likeliest token now, the lowest of equals;
6. top-k, top-p of what top-k kept, min-p, typical-p of what these kept (`kernels/sampling.py`, `kernels/typical.py`);
7. the draw, by noise that depends on (seed, sample, position) only.
"""

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..kernels.logit_masks import allow_bits_
from ..kernels.sampling import gumbel_race, highest, keep_top_
from ..kernels.typical import keep_likely_, keep_typical_
from .logit_rules import LogitRules, apply_rules_
from .request import NO_TOKEN, SamplingParams, Token


class Draw(NamedTuple):
    """How to draw one row's token."""

    params: SamplingParams
    sample: int  # sample index of the sequence
    position: int  # of the token to be drawn
    rules: LogitRules | None = None
    allowed: npt.NDArray[np.int32] | None = None  # as `Matching.allowed`; None: all


def sample(logits: Tensor, draws: Sequence[Draw], end_ids: Collection[int] = ()) -> list[Token]:
    """Draw a token a row: the noise depends on (seed, sample, position) only, never on the batch.

    `logits`: [rows, vocab], any float type, not changed; `end_ids`: the model's own ends of text. Logits that are not
    finite count as impossible; where none is finite all are alike. A row whose rules leave nothing gets NO_TOKEN.
    """
    if not draws:
        return []
    best, tokens = highest(logits)
    if not bool(best.isfinite().all()):  # a NaN or +inf in the row would be its maximum
        logits = _finite(logits)
        _, tokens = highest(logits)
    ruled = [i for i, draw in enumerate(draws) if draw.rules is not None or draw.allowed is not None]
    shaped = logits[ruled].to(torch.float32) if ruled else None  # a copy
    empty: set[int] = set()
    if shaped is not None:
        _shape_(shaped, [draws[i] for i in ruled], end_ids)
        best, tokens[ruled] = highest(shaped)
        empty = {i for i, value in zip(ruled, best.tolist(), strict=True) if value == float("-inf")}
    rows = [i for i, draw in enumerate(draws) if draw.params.temperature > 0.0 and i not in empty]
    if rows:
        part = logits[rows].to(torch.float32)
        if shaped is not None:
            _place(part, rows, shaped, ruled)
        tokens[rows] = _random(part, [draws[i] for i in rows])
    chosen = [NO_TOKEN if i in empty else token for i, token in enumerate(tokens.tolist())]
    return _with_logprobs(logits, draws, chosen)


def _shape_(logits: Tensor, draws: Sequence[Draw], end_ids: Collection[int]) -> None:
    """In place: what rules and constraints do. `logits`: float32 [len(draws), vocab]."""
    rules = {i: draw.rules for i, draw in enumerate(draws) if draw.rules is not None}
    if rules:
        part = logits if len(rules) == len(draws) else logits[list(rules)]
        apply_rules_(part, list(rules.values()), end_ids)
        if part is not logits:
            logits[list(rules)] = part
    masks = {i: draw.allowed for i, draw in enumerate(draws) if draw.allowed is not None}
    if masks:
        words = torch.from_numpy(np.stack(list(masks.values()))).to(logits.device)
        allow_bits_(logits, torch.tensor(list(masks), device=logits.device), words)


def _finite(logits: Tensor) -> Tensor:
    least = torch.finfo(torch.float32).min
    return logits.to(torch.float32).nan_to_num(nan=least, posinf=least, neginf=least)


def _place(part: Tensor, rows: list[int], shaped: Tensor, ruled: list[int]) -> None:
    """Rows of `part`, [len(rows), vocab], that are in `ruled` become those of `shaped`, [len(ruled), vocab]."""
    place = {row: i for i, row in enumerate(rows)}
    pairs = [(place[row], i) for i, row in enumerate(ruled) if row in place]
    if pairs:
        part[[to for to, _ in pairs]] = shaped[[i for _, i in pairs]]


def _random(logits: Tensor, draws: list[Draw]) -> Tensor:
    """`logits`: float32 [rows, vocab], overwritten; temperature above 0 in every row. Returns int64 [rows]."""
    device, params = logits.device, [draw.params for draw in draws]
    temperature = torch.tensor([p.temperature for p in params], device=device)
    # The largest becomes 0 first: a tiny temperature then cannot overflow to +inf.
    logits.sub_(logits.amax(dim=1, keepdim=True)).div_(temperature.unsqueeze(1))
    _filter_(logits, params)
    seeds = torch.tensor([signed(p.seed) for p in params], device=device)
    samples = torch.tensor([draw.sample for draw in draws], device=device)
    positions = torch.tensor([draw.position for draw in draws], device=device)
    return gumbel_race(logits, seeds, samples, positions)


def _filter_(logits: Tensor, params: list[SamplingParams]) -> None:
    """In place; the highest of each row is 0, before and after. Each filter runs on the rows that have it."""
    device = logits.device

    def each(rows: list[int], keep_: Callable[[Tensor], object]) -> None:
        part = logits if len(rows) == len(params) else logits[rows]
        keep_(part)
        if part is not logits:
            logits[rows] = part

    if cut := [i for i, p in enumerate(params) if p.top_k > 0 or p.top_p < 1.0]:
        top_k = torch.tensor([params[i].top_k for i in cut], device=device)
        top_p = _doubles([params[i].top_p for i in cut], device)
        each(cut, lambda part: keep_top_(part, top_k, top_p))
    if likely := [i for i, p in enumerate(params) if p.min_p > 0.0]:
        min_p = _doubles([params[i].min_p for i in likely], device)
        each(likely, lambda part: keep_likely_(part, min_p))
    if typical := [i for i, p in enumerate(params) if p.typical_p < 1.0]:
        typical_p = _doubles([params[i].typical_p for i in typical], device)
        each(typical, lambda part: keep_typical_(part, typical_p))
        logits.sub_(logits.amax(dim=1, keepdim=True))  # the likeliest may be gone; 0 changes nothing


def _doubles(values: list[float], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, device=device)


def signed(seed: int) -> int:
    """The same 64 bits as a signed number."""
    seed &= (1 << 64) - 1
    return seed - (1 << 64) if seed >> 63 else seed


def _with_logprobs(logits: Tensor, draws: Sequence[Draw], tokens: list[int]) -> list[Token]:
    result = [Token(token) for token in tokens]
    wanted = [
        (i, k) for i, draw in enumerate(draws) if (k := draw.params.logprobs) is not None and tokens[i] != NO_TOKEN
    ]
    if not wanted:
        return result
    logprobs = logits[[i for i, _ in wanted]].to(torch.float32).log_softmax(dim=1)
    top = logprobs.topk(min(max(k for _, k in wanted), logits.shape[1]), dim=1)
    for own, values, ids, (i, k) in zip(logprobs, top.values.tolist(), top.indices.tolist(), wanted, strict=True):
        chosen = (tokens[i], float(own[tokens[i]]))
        result[i] = Token(tokens[i], (chosen, *zip(ids[:k], values[:k], strict=True)))
    return result
