"""From a step's logits to tokens, each row by its own parameters."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels.sampling import gumbel_race, highest, keep_top_
from .request import SamplingParams, Token


class Draw(NamedTuple):
    """How to draw one row's token."""

    params: SamplingParams
    sample: int  # sample index of the sequence
    position: int  # of the token to be drawn


def sample(logits: Tensor, draws: Sequence[Draw]) -> list[Token]:
    """Draw a token a row: the noise depends on (seed, sample, position) only, never on the batch.

    `logits`: [rows, vocab], any float type. Logits that are not finite count as impossible; where none is finite all
    are alike. Log-probabilities are those of the raw logits, before temperature, top-k and top-p.
    """
    if not draws:
        return []
    best, tokens = highest(logits)
    if not bool(best.isfinite().all()):  # a NaN or +inf in the row would be its maximum
        logits = _finite(logits)
        _, tokens = highest(logits)
    rows = [i for i, draw in enumerate(draws) if draw.params.temperature > 0.0]
    if rows:
        tokens[rows] = _random(logits[rows].to(torch.float32), [draws[i] for i in rows])
    return _with_logprobs(logits, draws, tokens.tolist())


def _finite(logits: Tensor) -> Tensor:
    least = torch.finfo(torch.float32).min
    return logits.to(torch.float32).nan_to_num(nan=least, posinf=least, neginf=least)


def _random(logits: Tensor, draws: list[Draw]) -> Tensor:
    """`logits`: float32 [rows, vocab], overwritten; temperature above 0 in every row. Returns int64 [rows]."""
    device, params = logits.device, [draw.params for draw in draws]
    temperature = torch.tensor([p.temperature for p in params], device=device)
    # The largest becomes 0 first: a tiny temperature then cannot overflow to +inf.
    logits.sub_(logits.amax(dim=1, keepdim=True)).div_(temperature.unsqueeze(1))
    cut = [i for i, p in enumerate(params) if p.top_k > 0 or p.top_p < 1.0]
    if cut:
        top_k = torch.tensor([params[i].top_k for i in cut], device=device)
        top_p = torch.tensor([params[i].top_p for i in cut], device=device, dtype=torch.float64)
        part = logits if len(cut) == len(draws) else logits[cut]
        keep_top_(part, top_k, top_p)
        if part is not logits:
            logits[cut] = part
    seeds = torch.tensor([_signed(p.seed) for p in params], device=device)
    samples = torch.tensor([draw.sample for draw in draws], device=device)
    positions = torch.tensor([draw.position for draw in draws], device=device)
    return gumbel_race(logits, seeds, samples, positions)


def _signed(seed: int) -> int:
    """The same 64 bits as a signed number."""
    seed &= (1 << 64) - 1
    return seed - (1 << 64) if seed >> 63 else seed


def _with_logprobs(logits: Tensor, draws: Sequence[Draw], tokens: list[int]) -> list[Token]:
    result = [Token(token) for token in tokens]
    wanted = [(i, k) for i, draw in enumerate(draws) if (k := draw.params.logprobs) is not None]
    if not wanted:
        return result
    logprobs = logits[[i for i, _ in wanted]].to(torch.float32).log_softmax(dim=1)
    top = logprobs.topk(min(max(k for _, k in wanted), logits.shape[1]), dim=1)
    for own, values, ids, (i, k) in zip(logprobs, top.values.tolist(), top.indices.tolist(), wanted, strict=True):
        chosen = (tokens[i], float(own[tokens[i]]))
        result[i] = Token(tokens[i], (chosen, *zip(ids[:k], values[:k], strict=True)))
    return result
