"""The gateway's end of the worker API against the worker's own."""

from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twostroke.engine.request import (
    Constraint,
    ConstraintKind,
    FinishReason,
    PromptLogprobs,
    SamplingParams,
    SequenceKey,
    SequenceOutput,
    SequenceTimings,
    Token,
    Work,
)
from twostroke.errors import InvalidRequest, Mismatch
from twostroke.services.gateway.wire_gateway import make_cancel, make_submit, unpack_step
from twostroke.services.worker.wire import pack_step, read_submit
from twostroke.v1 import worker_pb2 as pb

GATEWAY = 77
KEY = SequenceKey(GATEWAY, 5, 0, 2)
IDS = st.integers(0, (1 << 32) - 1)
LOGPROBS = st.lists(st.tuples(IDS, st.floats(-100, 0, width=32)), max_size=3).map(tuple)
MICROS = st.integers(0, 10**9).map(lambda us: us / 1e6)


@st.composite
def outputs(draw: st.DrawFn) -> SequenceOutput:
    logprobs = draw(st.booleans())
    tokens = draw(st.lists(st.builds(Token, IDS, LOGPROBS if logprobs else st.just(())), max_size=4))
    return SequenceOutput(
        SequenceKey(GATEWAY, draw(st.integers(0, 1 << 63)), draw(st.integers(0, 3)), draw(st.integers(0, 9))),
        draw(IDS),
        tokens,
        draw(st.sampled_from([None, *FinishReason])),
        draw(st.none() | st.builds(SequenceTimings, MICROS, MICROS, MICROS, st.integers(0, 9000))),
    )


@given(st.lists(outputs(), max_size=5))
def test_a_step_comes_back_as_it_was(made: list[SequenceOutput]) -> None:
    message = pb.FromWorker.FromString(pack_step(9, made).SerializeToString())
    assert unpack_step(message.step, GATEWAY) == made


@given(
    st.sampled_from(list(Work)),
    st.lists(IDS, min_size=1, max_size=5),
    st.lists(IDS, max_size=3),
    st.builds(
        SamplingParams,
        temperature=st.floats(0, 100, width=32),
        top_k=st.integers(0, 1 << 31),
        top_p=st.floats(0, 1, width=32),
        seed=st.integers(0, (1 << 64) - 1),
        max_tokens=IDS,
        stop_token_ids=st.lists(IDS, max_size=3).map(tuple),
        ignore_eos=st.booleans(),
        logprobs=st.none() | st.integers(0, 20),
        constraint=st.none() | st.builds(Constraint, st.sampled_from(ConstraintKind), st.text(max_size=9)),
    ),
)
def test_a_submission_arrives_as_it_was(
    work: Work, prompt: list[int], output: list[int], params: SamplingParams
) -> None:
    peer = None if work is Work.ALL else pb.Peer(address="127.0.0.1:1", incarnation=4)
    made = make_submit(
        KEY, work, prompt, params, output_ids=output, peer=peer, start_now=True, timeout_s=1.5, cache_salt=b"s"
    )
    request, address = read_submit(GATEWAY, pb.Submit.FromString(made.SerializeToString()), 100.0)
    assert (request.key, request.work, request.params) == (KEY, work, params)
    assert (request.prompt_ids, request.output_ids) == (prompt, output)
    assert (request.deadline, request.cache_salt, request.start_now) == (101.5, b"s", True)
    assert (address is None) == (work is Work.ALL)


@pytest.mark.parametrize(("left", "timeout_ms"), [(None, 0), (0.0001, 1), (-3.0, 1), (2.0, 2000)])
def test_a_deadline_is_never_told_as_none(left: float | None, timeout_ms: int) -> None:
    assert make_submit(KEY, Work.ALL, [1], SamplingParams(), timeout_s=left).timeout_ms == timeout_ms


@pytest.mark.parametrize("priority", [0, -(1 << 31), (1 << 31) - 1])
def test_a_priority_arrives(priority: int) -> None:
    made = make_submit(KEY, Work.ALL, [1], SamplingParams(), priority=priority)
    assert read_submit(GATEWAY, pb.Submit.FromString(made.SerializeToString()), 0.0)[0].priority == priority


def test_cancel() -> None:
    cancel = make_cancel([KEY, SequenceKey(GATEWAY, 6, 0, 0)])
    assert (list(cancel.requests), list(cancel.attempts), list(cancel.samples)) == ([5, 6], [2, 0], [0, 0])


@pytest.mark.parametrize(("samples", "told"), [(1, 0), (2, 2), (16, 16)])
def test_samples(samples: int, told: int) -> None:
    made = make_submit(KEY, Work.ALL, [1], SamplingParams(), samples=samples)
    assert made.samples == told
    assert read_submit(GATEWAY, made, 0.0)[0].samples == samples


@pytest.mark.parametrize(("first", "samples"), [(0, 17), (0, (1 << 32) - 1), ((1 << 32) - 1, 2)])
def test_too_many_samples(first: int, samples: int) -> None:
    made = make_submit(KEY._replace(sample=first), Work.ALL, [1], SamplingParams(), samples=samples)
    with pytest.raises(InvalidRequest) as refused:
        read_submit(GATEWAY, made, 0.0)
    assert refused.value.field == "samples"


def whole() -> pb.Step:
    tokens = [Token(7, ((7, -1.0), (8, -2.0))), Token(9, ((9, -1.0), (8, -2.0)))]
    return pack_step(1, [SequenceOutput(KEY, 0, tokens, None, None)]).step


@pytest.mark.parametrize(
    "field",
    ["samples", "attempts", "first_indices", "counts", "finishes", "token_ids", "logprob_counts", "logprob_ids"],
)
def test_arrays_that_contradict_each_other_are_refused(field: str) -> None:
    step = whole()
    getattr(step, field).append(1)
    with pytest.raises(Mismatch):
        unpack_step(step, GATEWAY)


def test_an_unknown_finish_reason_is_refused() -> None:
    step = whole()
    step.finishes[0] = 9
    with pytest.raises(Mismatch, match="9"):
        unpack_step(step, GATEWAY)


ALL_PARAMS = SamplingParams(
    temperature=0.5,
    top_k=3,
    top_p=0.25,
    seed=(1 << 64) - 1,
    max_tokens=20,
    stop_token_ids=(7,),
    ignore_eos=True,
    logprobs=0,
    min_p=0.125,
    typical_p=0.75,
    repetition_penalty=1.5,
    presence_penalty=-0.5,
    frequency_penalty=0.25,
    logit_bias=((4, 1.0), (2, -8.0)),
    allowed_token_ids=(4, 5),
    banned_token_ids=(6,),
    bad_words=((1,), (2, 3)),
    min_tokens=3,
    prompt_logprobs=0,
    constraint=Constraint(ConstraintKind.CHOICE, '["ja", "nein"]'),
)


@pytest.mark.parametrize("params", [SamplingParams(), ALL_PARAMS])
def test_all_parameters_arrive(params: SamplingParams) -> None:
    request, _ = read_submit(GATEWAY, make_submit(KEY, Work.ALL, [1], params), 0.0)
    assert request.params == params
    assert all(getattr(ALL_PARAMS, f.name) != f.default for f in fields(SamplingParams))


def test_absent_parameters_are_neutral() -> None:
    """A sender of an earlier version: 0 where 1 is neutral."""
    request, _ = read_submit(GATEWAY, pb.Submit(work=pb.WORK_ALL, params=pb.SamplingParams()), 0.0)
    assert (request.params.typical_p, request.params.repetition_penalty, request.params.prompt_logprobs) == (1, 1, None)


def test_a_bias_without_a_value() -> None:
    params = pb.SamplingParams(bias_ids=[1, 2], bias_values=[0.5])
    with pytest.raises(InvalidRequest) as caught:
        read_submit(GATEWAY, pb.Submit(work=pb.WORK_ALL, params=params), 0.0)
    assert caught.value.field == "logit_bias"


def test_prompt_logprobs_arrive_with_their_sequence() -> None:
    told = PromptLogprobs(3, [2, 1], [7, 8, 9], [-1.0, -2.0, -0.5])
    other = SequenceKey(GATEWAY, 6, 0, 0)
    step = pack_step(
        4,
        [
            SequenceOutput(other, 0, [Token(1)], None, None),
            SequenceOutput(KEY, 0, [], None, None, told),
            SequenceOutput(KEY, 0, [Token(5)], None, None),
        ],
    ).step
    first, second, third = unpack_step(step, GATEWAY)
    assert (first.prompt_logprobs, third.prompt_logprobs) == (None, None)
    assert (second.key, second.tokens) == (KEY, [])
    got = second.prompt_logprobs
    assert got is not None
    assert (got.first_position, list(got.counts), list(got.ids), list(got.values)) == (
        3,
        told.counts,
        told.ids,
        told.values,
    )


@pytest.mark.parametrize(
    "told",
    [
        PromptLogprobs(1, [2], [7], [-1.0]),
        PromptLogprobs(1, [1], [7], [-1.0, -2.0]),
        PromptLogprobs(1, [1, 0], [7], [-1.0]),
    ],
)
def test_prompt_logprobs_that_do_not_add_up(told: PromptLogprobs) -> None:
    step = pack_step(4, [SequenceOutput(KEY, 0, [], None, None, told)]).step
    with pytest.raises(Mismatch, match="do not add up"):
        unpack_step(step, GATEWAY)
