"""Penalties on tokens that occurred already."""

import torch
from torch import Tensor


def penalize_(
    logits: Tensor,
    rows: Tensor,
    ids: Tensor,
    counts: Tensor,
    *,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
) -> None:
    """In place: the repetition penalty on every named token; presence and frequency penalties on those in the output.

    `logits`: float32 [rows, vocab]. `rows`, `ids`, `counts`: int64 [entries]: token `ids[i]` occurred in the prompt or
    the output of row `rows[i]`, `counts[i]` times (0 or more) in the output; no pair of row and token comes twice.
    `repetition`, `presence`, `frequency`: float32 [rows]; 1, 0 and 0 change nothing. Sources: Keskar et al., CTRL
    (2019), section 4.1, with negative logits multiplied, as is usual; OpenAI's API reference for the other two.
    """
    values = logits[rows, ids]
    factor = repetition[rows]
    values = torch.where(values > 0, values / factor, values * factor)
    values -= presence[rows] * (counts > 0)
    values -= frequency[rows] * counts
    logits[rows, ids] = values
