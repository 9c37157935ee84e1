"""Biases on logits, and tokens that may not be drawn."""

import torch
from torch import Tensor

EXCLUDED = float("-inf")


def add_bias_(logits: Tensor, rows: Tensor, ids: Tensor, bias: Tensor) -> None:
    """In place: adds `bias[i]` to the logit of token `ids[i]` in row `rows[i]`; no such pair comes twice.

    `logits`: float32 [rows, vocab]; `rows`, `ids`: int64 [entries]; `bias`: float32 [entries], finite.
    """
    logits[rows, ids] += bias


def forbid_(logits: Tensor, rows: Tensor, ids: Tensor) -> None:
    """In place: token `ids[i]` cannot be drawn in row `rows[i]`. Pairs may come twice.

    `logits`: float [rows, vocab]; `rows`, `ids`: int64 [entries].
    """
    logits[rows, ids] = EXCLUDED


def allow_bits_(logits: Tensor, rows: Tensor, words: Tensor) -> None:
    """In place: in row `rows[i]` token t can be drawn only where bit t % 32 of `words[i, t // 32]` is 1.

    `logits`: float [rows, vocab]; `rows`: int64 [n], each once; `words`: int32 [n, ceil(vocab / 32)].
    """
    vocab = logits.shape[1]
    bits = torch.arange(32, dtype=torch.int32, device=logits.device)
    allowed = ((words.unsqueeze(2) >> bits) & 1).to(torch.bool).flatten(1)[:, :vocab]
    logits[rows] = logits[rows].masked_fill_(~allowed, EXCLUDED)


def allow_only_(logits: Tensor, rows: Tensor, ids: Tensor) -> None:
    """In place: in each row that `rows` names only its tokens in `ids` can be drawn. Pairs may come twice.

    `logits`: float [rows, vocab]; `rows`, `ids`: int64 [entries].
    """
    values = logits[rows, ids]
    limited = torch.zeros(logits.shape[0], 1, dtype=torch.bool, device=logits.device)
    limited[rows] = True
    logits.masked_fill_(limited, EXCLUDED)
    logits[rows, ids] = values
