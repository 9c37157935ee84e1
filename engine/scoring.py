"""Log-probabilities of a prompt's own tokens."""

from array import array
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from .batch import Scoring
from .request import PromptLogprobs

HEAD_ROWS = 32  # logits of so many positions exist at once: 16 MiB of float32 at a vocabulary of 128k


def score(hidden: Tensor, head: Callable[[Tensor], Tensor], scorings: list[Scoring]) -> None:
    """Fills in `result` of each.

    `hidden`: [positions, width], of the positions before all targets, one scoring after another; `head`: from
    [rows, width] to logits [rows, vocab]. Non-finite logits count as in `sampler.sample`.
    """
    start = 0
    for scoring in scorings:
        count = len(scoring.targets)
        scoring.result = _score(hidden[start : start + count], head, scoring)
        start += count


def _score(hidden: Tensor, head: Callable[[Tensor], Tensor], scoring: Scoring) -> PromptLogprobs:
    ids, values, width = array("I"), array("f"), 1
    for part, targets in _pieces(hidden, scoring.targets):
        logits = head(part).to(torch.float32)
        least = torch.finfo(torch.float32).min
        logprobs = logits.nan_to_num(nan=least, posinf=least, neginf=least).log_softmax(dim=1)
        own = torch.tensor(targets, device=hidden.device).unsqueeze(1)
        top = logprobs.topk(min(scoring.top, logprobs.shape[1]), dim=1)
        width = 1 + top.indices.shape[1]
        ids.extend(torch.cat((own, top.indices), dim=1).view(-1).tolist())
        values.extend(torch.cat((logprobs.gather(1, own), top.values), dim=1).view(-1).tolist())
    return PromptLogprobs(scoring.first, [width] * len(scoring.targets), ids, values)


def _pieces(hidden: Tensor, targets: list[int]) -> Iterator[tuple[Tensor, list[int]]]:
    for start in range(0, len(targets), HEAD_ROWS):
        yield hidden[start : start + HEAD_ROWS], targets[start : start + HEAD_ROWS]
