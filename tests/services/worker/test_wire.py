"""Session messages into the engine's data and back, against the gateway's own end of the wire."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twostroke.engine.request import (
    FinishReason,
    SamplingParams,
    SequenceKey,
    SequenceOutput,
    SequenceTimings,
    Token,
    Work,
)
from twostroke.errors import (
    DeadlineExceeded,
    HandoverExpired,
    InvalidRequest,
    TwostrokeError,
    Unavailable,
)
from twostroke.services.gateway import wire_gateway
from twostroke.services.handover.handover import PeerAddress
from twostroke.services.worker import wire
from twostroke.v1 import worker_pb2 as pb

GATEWAY = 0xFEDCBA9876543210
U32 = st.integers(0, 2**32 - 1)
U64 = st.integers(0, 2**64 - 1)
IDS = st.lists(U32, max_size=40)
FLOAT32 = st.floats(width=32, allow_nan=False)


@st.composite
def outputs(draw: st.DrawFn) -> list[SequenceOutput]:
    made = []
    for _ in range(draw(st.integers(0, 6))):
        entries = st.lists(st.tuples(U32, FLOAT32), max_size=4).map(tuple)
        tokens = draw(st.lists(st.builds(Token, U32, entries), max_size=5))
        timings = draw(
            st.none()
            | st.builds(
                lambda a, b, c, n: SequenceTimings(a / 1e6, b / 1e6, c / 1e6, n),
                *[st.integers(0, 10**12)] * 3,
                U32,
            )
        )
        key = SequenceKey(GATEWAY, draw(U64), draw(U32), draw(U32))
        made.append(SequenceOutput(key, draw(U32), tokens, draw(st.sampled_from([None, *FinishReason])), timings))
    return made


@given(outputs(), st.integers(0, 2**63))
def test_a_step_survives_the_round_trip(made: list[SequenceOutput], step: int) -> None:
    message = pb.FromWorker.FromString(wire.pack_step(step, made).SerializeToString())
    assert message.WhichOneof("kind") == "step"
    assert message.step.step == step
    got = wire_gateway.unpack_step(message.step, GATEWAY)
    assert [(o.key, o.first_index, o.tokens, o.finish) for o in got] == [
        (o.key, o.first_index, o.tokens, o.finish) for o in made
    ]
    for theirs, ours in zip(got, made, strict=True):
        if ours.timings is None:
            assert theirs.timings is None
            continue
        assert theirs.timings is not None
        assert theirs.timings.cached_tokens == ours.timings.cached_tokens
        for name in ("queue", "prefill", "transfer"):
            assert getattr(theirs.timings, name) == pytest.approx(getattr(ours.timings, name), abs=1e-6)


def test_what_took_less_than_a_microsecond_did_happen() -> None:
    packed = wire.pack_timings(3, SequenceTimings(queue=1e-9, prefill=0.0, transfer=1.25))
    assert (packed.sequence, packed.queue_us, packed.prefill_us, packed.transfer_us) == (3, 1, 0, 1_250_000)


def test_a_step_without_logprobs_has_no_logprob_arrays() -> None:
    plain = SequenceOutput(SequenceKey(1, 2, 0, 0), 4, [Token(7), Token(8)], None, None)
    step = wire.pack_step(1, [plain]).step
    assert (list(step.token_ids), list(step.counts)) == ([7, 8], [2])
    assert not step.logprob_counts


def test_mixed_logprobs_stay_with_their_tokens() -> None:
    key = SequenceKey(1, 2, 0, 0)
    made = [
        SequenceOutput(key, 0, [Token(7)], None, None),
        SequenceOutput(key._replace(request=3), 0, [Token(8, ((8, -math.inf), (9, -0.5)))], FinishReason.STOP, None),
        SequenceOutput(key._replace(request=4), 5, [], FinishReason.LENGTH, None),
    ]
    step = wire.pack_step(1, made).step
    assert list(step.logprob_counts) == [0, 2]
    assert list(step.logprob_values) == [-math.inf, -0.5]
    assert list(step.counts) == [1, 1, 0]
    assert list(step.finishes) == [0, 1, 2]


def test_outputs_are_grouped_by_gateway_in_order() -> None:
    made = [SequenceOutput(SequenceKey(n % 3, n, 0, 0), 0, [], None, None) for n in range(10)]
    groups = wire.by_gateway(made)
    assert [[o.key.request for o in groups[gateway]] for gateway in groups] == [[0, 3, 6, 9], [1, 4, 7], [2, 5, 8]]


@given(
    st.builds(SequenceKey, st.just(GATEWAY), U64, U32, U32),
    st.sampled_from(Work),
    IDS,
    IDS,
    st.binary(max_size=wire.MAX_SALT_BYTES),
    st.booleans(),
    st.builds(
        SamplingParams,
        temperature=FLOAT32,
        top_k=U32,
        top_p=FLOAT32,
        seed=U64,
        max_tokens=U32,
        stop_token_ids=IDS.map(tuple),
        ignore_eos=st.booleans(),
        logprobs=st.none() | U32,
    ),
)
def test_a_submit_survives_the_round_trip(
    key: SequenceKey,
    work: Work,
    prompt: list[int],
    output: list[int],
    salt: bytes,
    start_now: bool,
    params: SamplingParams,
) -> None:
    peer = pb.Peer(address="10.0.0.1:5", incarnation=77) if work is not Work.ALL else None
    message = wire_gateway.make_submit(
        key, work, prompt, params, output_ids=output, peer=peer, start_now=start_now, timeout_s=2.5, cache_salt=salt
    )
    request, address = wire.read_submit(GATEWAY, pb.Submit.FromString(message.SerializeToString()), 100.0)
    assert (request.key, request.work, request.prompt_ids, request.output_ids) == (key, work, prompt, output)
    assert (request.arrival, request.deadline) == (100.0, 102.5)
    assert (request.cache_salt, request.start_now, request.params) == (salt, start_now, params)
    assert request.writer == (77 if work is Work.DECODE else 0)
    assert address == (None if work is Work.ALL else PeerAddress("10.0.0.1:5", 77))


def test_no_timeout_is_no_deadline() -> None:
    request, _ = wire.read_submit(1, pb.Submit(work=pb.WORK_ALL, params=pb.SamplingParams()), 5.0)
    assert request.deadline is None


PEER = pb.Peer(address="a:1", incarnation=3)


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (pb.Submit(params=pb.SamplingParams()), "work"),
        (pb.Submit(work=9, params=pb.SamplingParams()), "work"),  # type: ignore[arg-type]
        (pb.Submit(work=pb.WORK_ALL), "params"),
        (pb.Submit(work=pb.WORK_ALL, params=pb.SamplingParams(), first_index=1), "first_index"),
        (pb.Submit(work=pb.WORK_ALL, params=pb.SamplingParams(), output_ids=[4]), "first_index"),
        (pb.Submit(work=pb.WORK_ALL, params=pb.SamplingParams(), cache_salt=b"x" * 65), "cache_salt"),
        (pb.Submit(work=pb.WORK_DECODE, params=pb.SamplingParams()), "peer.incarnation"),
        (pb.Submit(work=pb.WORK_PREFILL, params=pb.SamplingParams(), peer=pb.Peer(incarnation=1)), "peer.address"),
        (
            pb.Submit(work=pb.WORK_ALL, params=pb.SamplingParams(constraint=pb.OutputConstraint(kind=99))),  # type: ignore[arg-type]
            "constraint",
        ),
        (pb.Submit(work=pb.WORK_ALL, params=pb.SamplingParams(constraint=pb.OutputConstraint())), "constraint"),
        (
            pb.Submit(work=pb.WORK_PREFILL, params=pb.SamplingParams(), peer=pb.Peer(incarnation=1, address="x" * 300)),
            "peer.address",
        ),
    ],
)
def test_bad_submits_name_the_field(message: pb.Submit, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        wire.read_submit(1, message, 0.0)
    assert caught.value.field == field


def test_a_bad_entry_among_peers_is_left_out() -> None:
    peers = pb.Peers(
        peers=[PEER, pb.Peer(address="b:1"), pb.Peer(incarnation=4), pb.Peer(address="c:1", incarnation=5)]
    )
    assert wire.read_peers(peers) == [PeerAddress("a:1", 3), PeerAddress("c:1", 5)]


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (InvalidRequest("too long", field="prompt_ids"), pb.FAILURE_CODE_INVALID, "too long"),
        (DeadlineExceeded("late", field="no field of a request"), pb.FAILURE_CODE_DEADLINE, "late"),
        (HandoverExpired("writer gone"), pb.FAILURE_CODE_WRITER_LOST, "writer gone"),
        (Unavailable("draining"), pb.FAILURE_CODE_DRAINING, "draining"),
        (TwostrokeError("broken"), pb.FAILURE_CODE_INTERNAL, "broken"),
        (KeyError("a prompt's text"), pb.FAILURE_CODE_INTERNAL, "internal error (KeyError)"),
        (InvalidRequest("x" * 5000), pb.FAILURE_CODE_INVALID, "x" * wire.MAX_MESSAGE),
    ],
)
def test_failures(error: Exception, code: pb.FailureCode.ValueType, text: str) -> None:
    key = SequenceKey(1, 2, 3, 4)
    failure = wire.pack_failure(key, error).failure
    assert (failure.code, failure.message) == (code, text)
    assert failure.field == ("prompt_ids" if text == "too long" else "")
    assert wire.key_of(1, failure) == key
