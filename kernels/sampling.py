"""Drawing tokens from logits: top-k and top-p without sorting the vocabulary, and the draw itself."""

import torch
from torch import Tensor
from torch.nn import functional

from .philox import gumbel_noise

CANDIDATES = 256  # sorted first; rows whose cut may lie further down go on with GROWTH times as many
GROWTH = 16
BLOCK = 256  # tokens of a block in the two-stage draw
_TOKEN_STREAM, _BLOCK_STREAM = 0, 1


def keep_top_(logits: Tensor, top_k: Tensor, top_p: Tensor, candidates: int = CANDIDATES) -> None:
    """Sets, in place, all but the top k, and of these all but the fewest whose share is at least p, to -inf.

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
    total = mass.gather(1, top_k.clamp(max=count).unsqueeze(1) - 1).squeeze(1)  # of what top-k kept
    if bool((uncut := top_k == vocab).any()):
        total[uncut] = (logits[uncut] - values[uncut, :1]).exp_().sum(dim=1).to(torch.float64)
    kept = (torch.arange(count, device=logits.device) < top_k.unsqueeze(1)) & (
        (mass - weights < (top_p * total).unsqueeze(1)) | (top_p >= 1.0).unsqueeze(1)
    )
    # A cut that reaches the last candidate's value may have missed tokens, or taken the wrong ones of equals.
    last = values.gather(1, kept.sum(dim=1, keepdim=True) - 1).squeeze(1)
    undecided = (last <= values[:, -1]).nonzero().squeeze(1) if count < vocab else ids[:0, 0]
    again = logits[undecided]
    logits.fill_(float("-inf")).scatter_(1, ids, values.masked_fill_(~kept, float("-inf")))
    if undecided.numel():
        keep_top_(again, top_k[undecided], top_p[undecided], GROWTH * count)
        logits[undecided] = again


def _ranked(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` highest logits and their token ids, highest first, equals by token id."""
    if count == logits.shape[1]:
        values, ids = logits.sort(dim=1, descending=True, stable=True)
        return values, ids
    ids = logits.topk(count, dim=1, sorted=False).indices.sort(dim=1).values
    values, order = logits.gather(1, ids).sort(dim=1, descending=True, stable=True)
    return values, ids.gather(1, order)


def highest(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The highest logit of each row and its token id, the lowest of equals. `logits`: [rows, vocab]; NaN is highest.

    By blocks, because maxima alone are an order of magnitude faster to find on a CPU than their places.
    """
    blocks = _blocks(logits)
    maxima = blocks.amax(dim=2)
    block = maxima.argmax(dim=1)
    rows = torch.arange(logits.shape[0], device=logits.device)
    return maxima[rows, block], block * BLOCK + blocks[rows, block].argmax(dim=1)


def _blocks(logits: Tensor) -> Tensor:
    """[rows, vocab] -> [rows, blocks, BLOCK], filled up with -inf."""
    short = -logits.shape[1] % BLOCK
    padded = functional.pad(logits, (0, short), value=float("-inf")) if short else logits
    return padded.view(logits.shape[0], -1, BLOCK)


def gumbel_race(logits: Tensor, seeds: Tensor, samples: Tensor, positions: Tensor) -> Tensor:
    """Draws a token a row from softmax(logits): the block of BLOCK tokens first, then the token in it.

    Each stage takes the largest of log-weight + Gumbel noise, so that noise is needed for the blocks and for one
    block's tokens only, not for the vocabulary; the product of the two is the softmax exactly.

    `logits`: float32 [rows, vocab], the highest of each row 0; `seeds`, `samples`, `positions`: int64 [rows], the
    noise's key. Returns int64 [rows]. Source: Maddison et al., A* Sampling (2014), section 2.
    """
    blocks = _blocks(logits)
    numbers = torch.arange(blocks.shape[1], device=logits.device)
    weights = blocks.exp().sum(dim=2).to(torch.float64).log_()
    block = (weights + gumbel_noise(seeds, samples, positions, _BLOCK_STREAM, numbers)).argmax(dim=1)
    inside = blocks[torch.arange(len(block), device=logits.device), block].to(torch.float64)
    ids = block.unsqueeze(1) * BLOCK + torch.arange(BLOCK, device=logits.device)
    winner = (inside + gumbel_noise(seeds, samples, positions, _TOKEN_STREAM, ids)).argmax(dim=1)
    return block * BLOCK + winner
