"""Filters on a distribution's shape: min-p and locally typical sampling."""

import torch
from torch import Tensor

EXCLUDED = float("-inf")
BLOCK = 256


def keep_likely_(logits: Tensor, min_p: Tensor) -> None:
    """In place: tokens less than `min_p` times as likely as the likeliest one become -inf.

    `logits`: float32 [rows, vocab], temperature applied, no NaN and no +inf, one finite a row; `min_p`: float64 [rows],
    0 to 1; the likeliest token always stays. Source: Nguyen et al., Min-p Sampling (2024).
    """
    least = logits.amax(dim=1) + min_p.log().to(torch.float32)
    logits.masked_fill_(logits < least.unsqueeze(1), EXCLUDED)


def keep_typical_(logits: Tensor, typical_p: Tensor, candidates: int = 256) -> None:
    """In place: keeps the fewest tokens, nearest to the expected surprise first, whose share is at least `typical_p`.

    `logits`: float32 [rows, vocab], temperature applied, no NaN and no +inf, one finite a row; `typical_p`: float64
    [rows], over 0, up to 1, a share of what is not -inf. A token's surprise is -log of its probability; of equally near
    ones the lower token ids come first. The result does not depend on `candidates`, how many are sorted first. Source:
    Meister et al., Locally Typical Sampling (2023), section 4.
    """
    possible = logits > EXCLUDED
    shifted = logits - logits.amax(dim=1, keepdim=True)
    share = shifted.exp()
    total = _sum(share).unsqueeze(1)
    share /= total.to(torch.float32)
    surprise = total.log().to(torch.float32) - shifted
    expected = _sum((share * surprise).masked_fill_(~possible, 0.0)).unsqueeze(1)
    distance = surprise.sub_(expected.to(torch.float32)).abs_()  # infinite for what is impossible
    kept = torch.zeros_like(possible)
    undecided = torch.arange(len(logits), device=logits.device)
    count = candidates
    while undecided.numel():
        count = min(count, logits.shape[1])
        near, ids = _nearest(distance[undecided], count)
        mass = share[undecided].gather(1, ids).to(torch.float64)
        before = mass.cumsum(dim=1) - mass
        within = before < typical_p[undecided].unsqueeze(1)
        # The last candidate's equals may lie outside; then so may tokens that come before it.
        last = near.gather(1, within.sum(dim=1, keepdim=True) - 1).squeeze(1)
        sure = (last < near[:, -1]) | (count == logits.shape[1])
        kept[undecided[sure]] = kept[undecided[sure]].scatter(1, ids[sure], within[sure])
        undecided, count = undecided[~sure], count * 16
    logits.masked_fill_(~kept, EXCLUDED)


def _nearest(distance: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` smallest distances and their token ids, smallest first, equals by token id."""
    if count == distance.shape[1]:
        values, ids = distance.sort(dim=1, stable=True)
        return values, ids
    ids = distance.topk(count, dim=1, largest=False, sorted=False).indices.sort(dim=1).values
    values, order = distance.gather(1, ids).sort(dim=1, stable=True)
    return values, ids.gather(1, order)


def _sum(values: Tensor) -> Tensor:
    """Row sums in float64, [rows, vocab] -> [rows], by blocks: the same however many rows and threads there are."""
    whole = values.shape[1] // BLOCK * BLOCK
    blocks = values[:, :whole].reshape(values.shape[0], -1, BLOCK).sum(dim=2)
    return torch.cat((blocks, values[:, whole:]), dim=1).to(torch.float64).sum(dim=1)
