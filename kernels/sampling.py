"""Drawing tokens from logits: top-k and top-p without sorting the vocabulary, and the draw itself."""

import torch
from torch import Tensor
from torch.nn import functional

from .philox import gumbel_noise

CANDIDATES = 1024  # sorted first; rows whose cut may lie further down sort everything
BLOCK = 256  # tokens of a block in the two-stage draw
_TOKEN_STREAM, _BLOCK_STREAM = 0, 1


def keep_top(logits: Tensor, top_k: Tensor, top_p: Tensor, candidates: int = CANDIDATES) -> Tensor:
    """Sets all but the top k, and of these all but the fewest whose share is at least p, to -inf.

    `logits`: float32 [rows, vocab], temperature applied, no NaN and no +inf; `top_k`: int64 [rows], 0 keeps all;
    `top_p`: float64 [rows], in (0, 1], a share of what top-k kept. Of equal logits the lower token ids rank higher.
    The result does not depend on `candidates`. Source: Holtzman et al. (2020) for top-p.
    """
    vocab = logits.shape[1]
    top_k = torch.where(top_k > 0, top_k, vocab).clamp_(max=vocab)
    count = min(vocab, max(candidates, int(top_k[top_k < vocab].amax()) + 1 if bool((top_k < vocab).any()) else 0))
    values, ids = _ranked(logits, count)
    weights = (values.to(torch.float64) - values[:, :1]).exp_()
    mass = weights.cumsum(dim=1)
    total = torch.where(
        top_k < vocab,
        mass.gather(1, top_k.clamp(max=count).unsqueeze(1) - 1).squeeze(1),
        (logits - values[:, :1]).exp_().sum(dim=1, dtype=torch.float64),
    )
    kept = (torch.arange(count, device=logits.device) < top_k.unsqueeze(1)) & (
        (mass - weights < (top_p * total).unsqueeze(1)) | (top_p >= 1.0).unsqueeze(1)
    )
    result = torch.full_like(logits, float("-inf"))
    result.scatter_(1, ids, values.masked_fill(~kept, float("-inf")))
    if count < vocab:
        # A cut that reaches the last candidate's value may have missed tokens, or taken the wrong ones of equals.
        last = values.gather(1, kept.sum(dim=1, keepdim=True) - 1).squeeze(1)
        open_rows = (last <= values[:, -1]).nonzero().squeeze(1)
        if open_rows.numel():
            result[open_rows] = keep_top(logits[open_rows], top_k[open_rows], top_p[open_rows], vocab)
    return result


def _ranked(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` highest logits and their token ids, highest first, equals by token id."""
    if count == logits.shape[1]:
        values, ids = logits.sort(dim=1, descending=True, stable=True)
        return values, ids
    ids = logits.topk(count, dim=1, sorted=False).indices.sort(dim=1).values
    values, order = logits.gather(1, ids).sort(dim=1, descending=True, stable=True)
    return values, ids.gather(1, order)


def gumbel_race(logits: Tensor, seeds: Tensor, samples: Tensor, positions: Tensor) -> Tensor:
    """Draws a token a row from softmax(logits): the block of BLOCK tokens first, then the token in it.

    Each stage takes the largest of log-weight + Gumbel noise, so that noise is needed for the blocks and for one
    block's tokens only, not for the vocabulary; the product of the two is the softmax exactly.

    `logits`: float32 [rows, vocab], at least one above -inf a row; `seeds`, `samples`, `positions`: int64 [rows], the
    noise's key. Returns int64 [rows]. Source: Maddison et al., A* Sampling (2014), section 2.
    """
    rows, vocab = logits.shape
    blocks = functional.pad(logits, (0, -vocab % BLOCK), value=float("-inf")).view(rows, -1, BLOCK)
    numbers = torch.arange(blocks.shape[1], device=logits.device)
    weights = blocks.logsumexp(dim=2).to(torch.float64)
    block = (weights + gumbel_noise(seeds, samples, positions, _BLOCK_STREAM, numbers)).argmax(dim=1)
    inside = blocks[torch.arange(rows, device=logits.device), block].to(torch.float64)
    ids = block.unsqueeze(1) * BLOCK + torch.arange(BLOCK, device=logits.device)
    winner = (inside + gumbel_noise(seeds, samples, positions, _TOKEN_STREAM, ids)).argmax(dim=1)
    return block * BLOCK + winner
