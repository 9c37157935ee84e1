"""Log-probabilities as routers take them: parallel lists, position by position."""

from collections.abc import Sequence
from itertools import islice

from ....engine.request import PromptLogprobs
from ....smg import vllm_engine_pb2 as pb

Entries = Sequence[tuple[int, float]]
"""(token, natural log-probability): the chosen one first, then the most likely ones."""


def output_logprobs(told: Sequence[Entries], *, top: bool) -> pb.OutputLogProbs:
    """Of tokens of an answer. `top`: most likely ones were asked for."""
    return pb.OutputLogProbs(
        token_logprobs=[entries[0][1] for entries in told],
        token_ids=[entries[0][0] for entries in told],
        top_logprobs=[_top(entries[1:]) for entries in told] if top else (),
    )


def input_logprobs(ids: Sequence[int], told: PromptLogprobs, *, top: bool) -> pb.InputLogProbs:
    """Of a prompt. Its first token follows nothing, so that nothing is told of it."""
    entries = zip(told.ids, told.values, strict=True)
    positions = [tuple(islice(entries, count)) for count in told.counts]
    return pb.InputLogProbs(
        token_logprobs=[pb.InputTokenLogProb(), *(pb.InputTokenLogProb(value=one[0][1]) for one in positions)],
        token_ids=ids,
        top_logprobs=[pb.TopLogProbs(), *(_top(one[1:]) for one in positions)] if top else (),
    )


def _top(entries: Entries) -> pb.TopLogProbs:
    return pb.TopLogProbs(values=[value for _, value in entries], token_ids=[token for token, _ in entries])
