"""Messages of a link over the wire: nothing is lost on the way, and what no honest peer sends is refused."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twostroke.engine.request import SequenceKey
from twostroke.errors import Mismatch
from twostroke.kvtransfer import messages as kv
from twostroke.services.handover.wire_link import (
    MAX_DESCRIPTOR,
    PoolOffer,
    check_format,
    check_incarnation,
    from_reader,
    from_writer,
    read_export,
    read_from_reader,
    read_from_writer,
    read_offer,
)
from twostroke.v1 import worker_pb2 as pb

U32 = st.integers(0, 2**32 - 1)
U64 = st.integers(0, 2**64 - 1)
TICKETS = st.integers(1, 2**64 - 1)
PAGES = 100
OFFER = PoolOffer(2**63 + 5, PAGES, 4096, b"/dev/shm/x")
FORM = pb.ModelFormat(
    model="tiny",
    fingerprint="ab",
    kv_dtype="float32",
    page_size=16,
    layers=2,
    kv_heads=4,
    head_dim=8,
    ranks=1,
    num_kv_heads=4,
)
KEYS = st.builds(SequenceKey, U64, U64, U32, U32)
FIRST = st.builds(
    kv.FirstToken,
    U32,
    U32,
    st.integers(0, 2),
    st.lists(st.tuples(U32, st.floats(width=32, allow_nan=False)), max_size=21).map(tuple),
    st.integers(0, 10**12).map(lambda us: us / 1e6),
    st.integers(0, 10**12).map(lambda us: us / 1e6),
    U32,
)
FROM_READER = st.one_of(
    st.builds(
        kv.Ticket,
        TICKETS,
        KEYS,
        st.just(OFFER.pool),
        st.lists(st.integers(1, PAGES - 1), unique=True, max_size=20).map(tuple),
        st.integers(0, 1000).map(lambda page: page * 16),
        st.integers(1, 86_400_000).map(lambda ms: ms / 1000),
    ),
    st.builds(kv.Revoke, TICKETS),
    st.builds(kv.Accepted, TICKETS),
    st.builds(kv.Resend, TICKETS, st.lists(st.integers(0, PAGES - 1), max_size=9).map(tuple), U32),
)
FROM_WRITER = st.one_of(
    st.builds(kv.Progress, st.lists(st.tuples(U64, U32, U32), max_size=9).map(tuple)),
    st.builds(
        kv.Complete,
        TICKETS,
        st.lists(FIRST, min_size=1, max_size=3).map(tuple),
        st.binary(max_size=10).map(lambda b: b * 8),
        U32,
    ),
    st.builds(kv.Drained, TICKETS, st.text(max_size=30)),
)


@given(FROM_READER)
def test_a_readers_messages_survive_the_wire(message: kv.FromReader) -> None:
    raw = pb.FromDecode.FromString(from_reader(message, FORM).SerializeToString())
    assert read_from_reader(raw, FORM, OFFER) == message


@given(FROM_WRITER)
def test_a_writers_messages_survive_the_wire(message: kv.FromWriter) -> None:
    raw = pb.FromPrefill.FromString(from_writer(message).SerializeToString())
    assert read_from_writer(raw) == message


def test_heartbeats_say_nothing() -> None:
    assert read_from_reader(pb.FromDecode(heartbeat=pb.Heartbeat(sequence=3)), FORM, OFFER) is None
    assert read_from_writer(pb.FromPrefill(heartbeat=pb.Heartbeat(sequence=3))) is None


def ticket(**changes: Any) -> pb.FromDecode:
    fields: dict[str, Any] = {
        "ticket": 1,
        "key": pb.SequenceKey(gateway=1, request=2),
        "pool": OFFER.pool,
        "pages": [3, 4],
        "first_position": 16,
        "valid_ms": 1000,
        "num_kv_heads": 4,
    }
    return pb.FromDecode(ticket=pb.Ticket(**{**fields, **changes}))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"ticket": 0}, "count from 1"),
        ({"pool": 1}, "not offered"),
        ({"pages": [0, 1]}, "within 1..99"),
        ({"pages": [3, PAGES]}, "within 1..99"),
        ({"pages": [3, 3]}, "distinct"),
        ({"first_position": 8}, "multiple of 16"),
        ({"num_kv_heads": 2}, "KV heads"),
        ({"rank": 1}, "rank"),
    ],
)
def test_tickets_that_no_honest_reader_writes(changes: dict[str, Any], words: str) -> None:
    assert read_from_reader(ticket(), FORM, OFFER) is not None
    with pytest.raises(Mismatch, match=words):
        read_from_reader(ticket(**changes), FORM, OFFER)


def test_a_tickets_validity_is_bounded() -> None:
    message = read_from_reader(ticket(valid_ms=2**63), FORM, OFFER)
    assert isinstance(message, kv.Ticket)
    assert message.valid_s == 86_400


@pytest.mark.parametrize(
    "raw",
    [
        pb.FromDecode(),
        pb.FromDecode(hello=pb.DecodeHello()),
        pb.FromDecode(revoke=pb.Revoke()),
        pb.FromDecode(resend=pb.Resend(ticket=1, ordinals=[PAGES])),
    ],
)
def test_other_messages_that_no_honest_reader_sends(raw: pb.FromDecode) -> None:
    with pytest.raises(Mismatch):
        read_from_reader(raw, FORM, OFFER)


@pytest.mark.parametrize(
    "raw",
    [
        pb.FromPrefill(),
        pb.FromPrefill(hello=pb.PrefillHello()),
        pb.FromPrefill(drained=pb.Drained()),
        pb.FromPrefill(progress=pb.Progress(tickets=[1, 2], layers=[1], pages=[1, 1])),
        pb.FromPrefill(complete=pb.Complete(ticket=1, first_tokens=[pb.FirstToken()], digests=b"123")),
        pb.FromPrefill(complete=pb.Complete(ticket=1)),
        pb.FromPrefill(complete=pb.Complete(ticket=1, first_tokens=[pb.FirstToken(finish=3)])),
        pb.FromPrefill(complete=pb.Complete(ticket=1, first_tokens=[pb.FirstToken(logprob_ids=[1])])),
        pb.FromPrefill(complete=pb.Complete(ticket=1, first_tokens=[pb.FirstToken()] * 129)),
    ],
)
def test_messages_that_no_honest_writer_sends(raw: pb.FromPrefill) -> None:
    with pytest.raises(Mismatch):
        read_from_writer(raw)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("fingerprint", "cd"),
        ("kv_dtype", "bfloat16"),
        ("page_size", 32),
        ("layers", 3),
        ("kv_heads", 2),
        ("head_dim", 16),
        ("ranks", 2),
        ("num_kv_heads", 2),
    ],
)
def test_another_format_is_refused_with_both_values(field: str, value: Any) -> None:
    other = pb.ModelFormat()
    other.CopyFrom(FORM)
    other.model = "another name for the same"
    check_format(FORM, other)
    setattr(other, field, value)
    with pytest.raises(Mismatch, match=f"{field}: {getattr(FORM, field)} here, {value} there"):
        check_format(FORM, other)


def test_incarnations() -> None:
    check_incarnation(5, 5)
    check_incarnation(5, 0)
    with pytest.raises(Mismatch, match="0000000000000005 here, 0000000000000006 expected"):
        check_incarnation(5, 6)


def test_offers() -> None:
    assert read_offer(OFFER.message()) == OFFER
    message = OFFER.message()
    message.transports.insert(0, pb.TransportOffer(name="warp"))
    assert read_offer(message) == OFFER
    del message.transports[1]
    with pytest.raises(Mismatch, match="nixl here, warp there"):
        read_offer(message)


def test_offers_of_several_ways() -> None:
    offer = PoolOffer(5, PAGES, 4096, b"/dev/shm/x", "shm", (("nixl", b""),))
    assert read_offer(offer.message()) == offer
    assert [(way.transport, way.descriptor) for way in offer.ways()] == [("shm", b"/dev/shm/x"), ("nixl", b"")]
    export = read_export(pb.TransportOffer(name="nixl", descriptor=b"there"), offer, "nixl")
    assert (export.transport, export.descriptor, export.further) == ("nixl", b"there", ())
    for wrong in (
        pb.TransportOffer(name="shm", descriptor=b"there"),
        pb.TransportOffer(name="nixl"),
        pb.TransportOffer(name="nixl", descriptor=bytes(MAX_DESCRIPTOR + 1)),
    ):
        with pytest.raises(Mismatch, match="nixl asked for"):
            read_export(wrong, offer, "nixl")
    for bad in (b"", bytes(MAX_DESCRIPTOR + 1)):
        message = PoolOffer(5, PAGES, 4096, bad).message()
        with pytest.raises(Mismatch, match="a descriptor of"):
            read_offer(message)
