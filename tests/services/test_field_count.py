"""How many fields a message has is known before it is read."""

from typing import Any

import pytest
from google.protobuf.message import DecodeError, Message
from hypothesis import given, settings
from hypothesis import strategies as st

from twostroke.oip import grpc_service_pb2 as oip
from twostroke.services.field_count import MAX_FIELDS, FieldCount
from twostroke.smg import vllm_engine_pb2 as smg
from twostroke.v1 import inference_pb2 as pb

from . import engine_fuzz, oip_fuzz

KIND = pb.GenerateRequest.DESCRIPTOR
TURNS = [pb.ChatMessage(role="user", content="x")] * 100


def count(message: Message) -> int:
    """How many fields the message's own bytes have, by trying."""
    data = message.SerializeToString()
    low, high = 0, len(data) + 1
    while low < high:
        middle = (low + high) // 2
        if FieldCount(middle, light=-1).exceeded(message.DESCRIPTOR, data):
            low = middle + 1
        else:
            high = middle
    return low


@pytest.mark.parametrize(
    ("message", "fields"),
    [
        (pb.GenerateRequest(), 0),
        (pb.GenerateRequest(model="m", n=3, priority=-(1 << 31)), 3),
        (pb.GenerateRequest(input=pb.Input(chat=pb.Chat(messages=TURNS))), 2 + 100 * 3),
        (pb.GenerateRequest(input=pb.Input(token_ids=pb.TokenIds(ids=range(1000)))), 3),  # packed
        (pb.GenerateRequest(sampling=pb.Sampling(logit_bias={1: 1.0, 1 << 31: 2.0}, seed=1 << 63)), 1 + 2 * 3 + 1),
        (pb.GenerateRequest(input=pb.Input(text="\n" * 1000)), 2),
    ],
)
def test_all_levels_count(message: pb.GenerateRequest, fields: int) -> None:
    assert count(message) == fields


MILLION = 1_000_000


@pytest.mark.parametrize(
    "data",
    [
        b"\x12\x85\x89\x7a\x1a\x81\x89\x7a" + b"\x0a\x00" * MILLION,  # turns of a chat
        b"\x92\x80\x00\x02\x1a\x00" * MILLION,  # inputs, whose number is written longer than it need be
        b"\x38\x01" * MILLION,  # a number, again and again
        b"\x38\x80\x80\x80\x80\x80\x80\x80\x80\x80\x01" * MILLION,
        b"\x7a\x00" * MILLION,  # a field that there is not
        b"\x7b\x7c" * MILLION,  # groups
        b"\x79aaaaaaaa\x7daaaa" * MILLION,  # 64 and 32 bits
        b"\x12\x02\x1a\x00" * MILLION + b"\x12",  # it breaks off
        b"\x12\xff\xff\x03\x1a\x00" + b"\x38\x01" * MILLION,  # a length beyond the end
    ],
)
def test_millions_are_too_many(data: bytes) -> None:
    assert FieldCount().exceeded(KIND, data)


def test_what_is_small_is_not_counted() -> None:
    assert not FieldCount().exceeded(KIND, b"\x38\x01" * 100_000)


def test_long_texts_tokens_and_chats_are_no_many_fields() -> None:
    for source in (
        pb.Input(text="long " * 200_000),
        pb.Input(token_ids=pb.TokenIds(ids=range(1 << 17))),
        pb.Input(chat=pb.Chat(messages=[pb.ChatMessage(role="user", content="long " * 50)] * 4096)),
    ):
        data = pb.GenerateRequest(input=source).SerializeToString()
        assert len(data) > 1 << 18
        assert not FieldCount().exceeded(KIND, data)


def objects(message: Message) -> int:
    """That a message became."""
    told = 0
    for field, value in message.ListFields():
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            told += len(value)
        elif field.message_type is not None:
            told += sum(1 + objects(each) for each in (value if field.is_repeated else [value]))
        else:
            told += 1
    return told


@settings(max_examples=150, deadline=None, database=None)
@given(st.one_of(engine_fuzz.wild(), engine_fuzz.likely(), oip_fuzz.wild(), oip_fuzz.likely()), st.data())
def test_no_message_becomes_more_objects_than_fields_were_counted(message: Message, data: Any) -> None:
    told = bytearray(message.SerializeToString())
    for _ in range(data.draw(st.integers(0, 2))):
        at = data.draw(st.integers(0, len(told)))
        told[at : at + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=3))
    kind: Any = oip.ModelInferRequest if isinstance(message, oip.ModelInferRequest) else smg.GenerateRequest
    try:
        read = kind.FromString(bytes(told))
    except DecodeError:
        FieldCount(2, light=-1).exceeded(kind.DESCRIPTOR, bytes(told))
        return
    number = objects(read)
    assert number == 0 or FieldCount(number - 1, light=-1).exceeded(kind.DESCRIPTOR, bytes(told))


def test_the_limit_is_above_what_doors_take() -> None:
    assert MAX_FIELDS > 3 * 4096  # turns of a chat, each with a role and a content
