"""The gateway's end of the worker API: submissions into messages, packed steps into sequences' outputs."""

from collections.abc import Iterable, Sequence
from itertools import repeat

from ...engine.request import (
    Constraint,
    FinishReason,
    PromptLogprobs,
    SamplingParams,
    SequenceKey,
    SequenceOutput,
    SequenceTimings,
    Token,
    Work,
    plain_tokens,
)
from ...errors import Mismatch
from ...v1 import worker_pb2 as pb


def make_submit(
    key: SequenceKey,
    work: Work,
    prompt_ids: Sequence[int],
    params: SamplingParams,
    *,
    output_ids: Sequence[int] = (),
    samples: int = 1,
    peer: pb.Peer | None = None,
    start_now: bool = False,
    timeout_s: float | None = None,
    cache_salt: bytes = b"",
    traceparent: str = "",
    priority: int = 0,
) -> pb.Submit:
    """A sequence for a worker, or `samples` of them, `key` being the first one's.

    `peer` is the other worker of a PREFILL or DECODE, `timeout_s` the time left.
    """
    return pb.Submit(
        request=key.request,
        sample=key.sample,
        attempt=key.attempt,
        work=pb.Work.ValueType(work),
        peer=peer,
        prompt_ids=prompt_ids,
        output_ids=output_ids,
        first_index=len(output_ids),
        params=make_params(params),
        start_now=start_now,
        timeout_ms=0 if timeout_s is None else max(1, round(timeout_s * 1000)),
        cache_salt=cache_salt,
        traceparent=traceparent,
        samples=samples if samples > 1 else 0,
        priority=priority,
    )


def make_params(params: SamplingParams) -> pb.SamplingParams:
    """Every default is filled in already."""
    return pb.SamplingParams(
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        seed=params.seed,
        max_tokens=params.max_tokens,
        stop_token_ids=params.stop_token_ids,
        ignore_eos=params.ignore_eos,
        logprobs=params.logprobs,
        min_p=params.min_p,
        typical_p=params.typical_p,
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        bias_ids=[token for token, _ in params.logit_bias],
        bias_values=[value for _, value in params.logit_bias],
        allowed_ids=params.allowed_token_ids,
        banned_ids=params.banned_token_ids,
        bad_words=[pb.TokenSequence(ids=word) for word in params.bad_words],
        min_tokens=params.min_tokens,
        prompt_logprobs=params.prompt_logprobs,
        constraint=make_constraint(params.constraint) if params.constraint is not None else None,
    )


def make_constraint(constraint: Constraint) -> pb.OutputConstraint:
    """What the output must be."""
    return pb.OutputConstraint(kind=pb.ConstraintKind.ValueType(constraint.kind), text=constraint.text)


def make_cancel(keys: Iterable[SequenceKey]) -> pb.Cancel:
    """Drops these attempts of these samples, and the ones before."""
    listed = list(keys)
    return pb.Cancel(
        requests=[key.request for key in listed],
        attempts=[key.attempt for key in listed],
        samples=[key.sample for key in listed],
    )


def unpack_step(step: pb.Step, gateway: int) -> list[SequenceOutput]:
    """The outputs of a step, one a sequence. Mismatch where the packed arrays contradict each other."""
    names = (step.requests, step.samples, step.attempts)
    columns = (step.first_indices, step.counts, step.finishes)
    if len({len(column) for column in (*names, *columns)}) != 1:
        raise Mismatch("a step's arrays differ in length")
    if sum(step.counts) != len(step.token_ids):
        raise Mismatch("a step's counts do not add up to its tokens")
    timings = unpack_timings(step)
    told = unpack_prompt_logprobs(step)
    tokens = unpack_tokens(step)
    keys = map(tuple.__new__, repeat(SequenceKey), zip(repeat(gateway), *names, strict=False))  # as `plain_tokens`
    outputs: list[SequenceOutput] = []
    start = 0
    for index, (key, first, count, finish) in enumerate(zip(keys, *columns, strict=True)):
        end = start + count
        reason = unpack_finish(finish) if finish else None
        outputs.append(SequenceOutput(key, first, tokens[start:end], reason, timings.get(index), told.get(index)))
        start = end
    return outputs


def unpack_finish(value: int) -> FinishReason:
    """Mismatch for a reason that is unknown here."""
    try:
        return FinishReason(value)
    except ValueError:
        raise Mismatch(f"a step names finish reason {value}, which is unknown here") from None


def unpack_tokens(step: pb.Step) -> list[Token]:
    """The flat arrays as tokens with their log-probabilities."""
    if not step.logprob_counts:
        return plain_tokens(step.token_ids)
    if len(step.logprob_counts) != len(step.token_ids):
        raise Mismatch("a step's logprob_counts and token_ids differ in length")
    entries = list(zip(step.logprob_ids, step.logprob_values, strict=False))
    if len(step.logprob_ids) != len(step.logprob_values) or sum(step.logprob_counts) != len(entries):
        raise Mismatch("a step's log-probabilities do not add up")
    tokens: list[Token] = []
    start = 0
    for token_id, count in zip(step.token_ids, step.logprob_counts, strict=True):
        tokens.append(Token(token_id, tuple(entries[start : start + count])))
        start += count
    return tokens


def unpack_prompt_logprobs(step: pb.Step) -> dict[int, PromptLogprobs]:
    """By index of the sequence. Mismatch where the arrays contradict each other."""
    told: dict[int, PromptLogprobs] = {}
    for part in step.prompt_logprobs:
        if not (sum(part.counts) == len(part.ids) == len(part.values)) or not all(part.counts):
            raise Mismatch("a prompt's log-probabilities do not add up")
        told[part.sequence] = PromptLogprobs(part.first_position, part.counts, part.ids, part.values)
    return told


def unpack_timings(step: pb.Step) -> dict[int, SequenceTimings]:
    """By index of the sequence; seconds."""
    return {
        timing.sequence: SequenceTimings(
            queue=timing.queue_us / 1e6,
            prefill=timing.prefill_us / 1e6,
            transfer=timing.transfer_us / 1e6,
            cached_tokens=timing.cached_tokens,
        )
        for timing in step.timings
    }
