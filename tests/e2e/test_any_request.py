"""Whatever a client sends, it gets an answer or a documented status, and the workers give everything back."""

import asyncio
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from twostroke.v1 import inference_pb2 as pb
from twostroke.v1 import inference_pb2_grpc as rpc

from .harness import Launch

VOCABULARY = 300  # about that of the tiny model
REFUSALS = {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND}
ENDINGS = REFUSALS | {grpc.StatusCode.OK, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED}
ENDINGS |= {grpc.StatusCode.RESOURCE_EXHAUSTED}  # a deadline that others' prompts do not leave the time for

TEXTS = st.one_of(
    st.text(max_size=40),
    st.sampled_from(
        ["", "user", "system", "tiny", "<|im_end|>", "\0", "\u202e\U0001f469\u200d\U0001f467", "e\u0301" * 20]
    ),
    st.text(min_size=1, max_size=8).map(lambda text: text * 300),
)
SMALL = st.one_of(st.integers(0, 4), st.integers(0, VOCABULARY))
FLOATS = st.one_of(st.floats(width=32), st.floats(0, 1, width=32), st.sampled_from([0.0, 0.5, 1.0, 2.0]))


def whole(bits: int) -> st.SearchStrategy[int]:
    """Mostly small numbers, now and then any."""
    return st.one_of(SMALL, SMALL, SMALL, st.integers(0, 2**bits - 1))


SCALARS: dict[int, st.SearchStrategy[Any]] = {
    FieldDescriptor.TYPE_STRING: TEXTS,
    FieldDescriptor.TYPE_BOOL: st.booleans(),
    FieldDescriptor.TYPE_FLOAT: FLOATS,
    FieldDescriptor.TYPE_UINT32: whole(32),
    FieldDescriptor.TYPE_UINT64: whole(64),
    FieldDescriptor.TYPE_SINT32: st.one_of(st.integers(-3, 3), st.integers(-(2**31), 2**31 - 1)),
}


def draw_message(draw: st.DrawFn, message: Message, *, wild: bool) -> None:
    """Sets some fields of any message of the schema; tame ones leave out what is seldom valid."""
    for field in message.DESCRIPTOR.fields:
        if field.name == "model" or not draw(st.booleans() if wild else st.integers(0, 3).map(lambda n: n == 0)):
            continue
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            getattr(message, field.name).update(draw(st.dictionaries(whole(32), FLOATS, max_size=4)))
        elif field.message_type is not None and field.is_repeated:
            for _ in range(draw(st.integers(0, 5))):
                draw_message(draw, getattr(message, field.name).add(), wild=wild)
        elif field.message_type is not None:
            draw_message(draw, getattr(message, field.name), wild=wild)
        elif field.is_repeated:
            getattr(message, field.name).extend(draw(st.lists(SCALARS[field.type], max_size=20)))
        else:
            setattr(message, field.name, draw(SCALARS[field.type]))


@st.composite
def requests(draw: st.DrawFn) -> pb.GenerateRequest:
    """Half of them have a plain prompt and few tokens, so that much of what follows runs."""
    request = pb.GenerateRequest(model=draw(st.sampled_from(["", "", "", "tiny", "gpt-5"])))
    wild = draw(st.booleans())
    draw_message(draw, request, wild=wild)
    if not wild:
        request.input.token_ids.ids[:] = draw(st.lists(st.integers(0, VOCABULARY - 40), min_size=1, max_size=70))
    if not wild or request.stopping.max_tokens > 40:
        request.stopping.max_tokens = draw(st.integers(1, 24))
    return request


class Caller:
    """A blocking client."""

    def __init__(self, address: str) -> None:
        self.channel = grpc.insecure_channel(address)
        self.stub = rpc.InferenceStub(self.channel)

    def together(self, asked: list[tuple[pb.GenerateRequest, int, float]]) -> None:
        """Runs (request, messages until it is cancelled, deadline) side by side and checks how each ends."""
        calls = [(request, stop, self.stub.Generate(request, timeout=deadline)) for request, stop, deadline in asked]
        for request, stop, call in calls:
            code = _ending(call, stop)
            assert code in ENDINGS, (code, call.details(), request)


def _ending(call: Any, stop: int) -> grpc.StatusCode:
    messages: Iterator[pb.GenerateResponse] = iter(call)
    try:
        for count, _ in enumerate(messages):
            if count == stop:
                call.cancel()
    except grpc.RpcError:
        pass
    code: grpc.StatusCode = call.code()
    return code


@pytest.mark.parametrize("examples", [60, pytest.param(600, marks=[pytest.mark.slow, pytest.mark.timeout(900)])])
async def test_any_request_has_a_documented_end(launch: Launch, tiny_dir, examples: int) -> None:
    """Generated over the whole schema: new fields are met without a change here."""
    async with launch("--model", str(tiny_dir), "--kv-memory", "8MiB", "--log-level", "warning") as stack:
        caller = Caller(stack.address)
        deadlines = st.sampled_from([60.0, 60.0, 60.0, 0.02, 0.0])
        asked = st.lists(st.tuples(requests(), st.integers(0, 40), deadlines), min_size=1, max_size=6)

        @settings(max_examples=examples, deadline=None, database=None, suppress_health_check=list(HealthCheck))
        @given(asked)
        def check(asked: list[tuple[pb.GenerateRequest, int, float]]) -> None:
            caller.together(asked)

        try:
            await asyncio.to_thread(check)
        finally:
            caller.channel.close()
        answer = await stack.client.tokens([5, 6, 7], max_tokens=4)
        assert len(answer.token_ids) == 4
        await stack.whole()
