"""Generated messages of the Open Inference Protocol, and a client that sends them and checks how each ends."""

import struct
from collections import Counter
from collections.abc import Iterator
from typing import Any

import grpc
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from twostroke.oip import grpc_service_pb2 as pb
from twostroke.oip import grpc_service_pb2_grpc as rpc
from twostroke.services.gateway.oip.sampling_fields import TAKEN, SamplingFields
from twostroke.services.gateway.oip.tensors import INPUTS, OUTPUTS

from .oip_client import infer, is_final

REFUSALS = {"INVALID_ARGUMENT", "NOT_FOUND", "UNIMPLEMENTED"}
ENDINGS = REFUSALS | {"OK", "DEADLINE_EXCEEDED", "CANCELLED", "RESOURCE_EXHAUSTED"}  # the last: too short a deadline
TEXTS = st.one_of(st.text(max_size=30), st.sampled_from(["", "\0", "llama", "1", "1e999", "[1]", '{"a": 1}', "null"]))
NUMBERS = st.one_of(st.integers(-2, 40), st.integers(-(1 << 62), 1 << 62))
NAMES = st.one_of(
    st.sampled_from([*INPUTS, *OUTPUTS]),
    st.sampled_from(sorted(TAKEN | SamplingFields.unsupported.keys())),
    st.sampled_from(["timeout", "priority", "sequence_id", "triton_enable_empty_final_response", "triton_x"]),
    TEXTS,
)
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, st.floats(allow_nan=False, allow_infinity=False), TEXTS),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(NAMES, inner, max_size=3)),
    max_leaves=6,
)
SCALARS: dict[int, st.SearchStrategy[Any]] = {
    FieldDescriptor.TYPE_STRING: st.one_of(NAMES, st.sampled_from(["BYTES", "BOOL", "FP32"])),
    FieldDescriptor.TYPE_BYTES: st.one_of(
        st.binary(max_size=12), TEXTS.map(lambda text: struct.pack("<I", len(text.encode())) + text.encode())
    ),
    FieldDescriptor.TYPE_BOOL: st.booleans(),
    FieldDescriptor.TYPE_FLOAT: st.floats(width=32),
    FieldDescriptor.TYPE_DOUBLE: st.floats(),
    FieldDescriptor.TYPE_INT32: st.integers(-(1 << 31), (1 << 31) - 1),
    FieldDescriptor.TYPE_INT64: NUMBERS,
    FieldDescriptor.TYPE_UINT32: st.integers(0, (1 << 32) - 1),
    FieldDescriptor.TYPE_UINT64: st.integers(0, 1 << 63),
}


def draw_message(draw: st.DrawFn, message: Message) -> None:
    """Sets some fields of any message of the schema."""
    for field in message.DESCRIPTOR.fields:
        if not draw(st.booleans()):
            continue
        value = getattr(message, field.name)
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            for name in draw(st.lists(NAMES, max_size=3)):
                draw_message(draw, value[name])
        elif field.message_type is not None and field.is_repeated:
            for _ in range(draw(st.integers(0, 3))):
                draw_message(draw, value.add())
        elif field.message_type is not None:
            value.SetInParent()
            draw_message(draw, value)
        elif field.is_repeated:
            value.extend(draw(st.lists(SCALARS[field.type], max_size=3)))
        else:
            setattr(message, field.name, draw(SCALARS[field.type]))


@st.composite
def wild(draw: st.DrawFn) -> pb.ModelInferRequest:
    """Of any shape."""
    request = pb.ModelInferRequest()
    draw_message(draw, request)
    return request


@st.composite
def likely(draw: st.DrawFn) -> pb.ModelInferRequest:
    """Nearly right: so much of what follows runs."""
    request = infer(
        draw(st.text(min_size=1, max_size=30)),
        raw=draw(st.booleans()),
        sampling=draw(st.one_of(st.none(), st.dictionaries(st.sampled_from(sorted(TAKEN)), VALUES, max_size=2))),
        outputs=draw(st.lists(st.sampled_from(list(OUTPUTS)), max_size=2)),
        **draw(st.dictionaries(st.sampled_from([n for n in INPUTS if INPUTS[n] == "BOOL"]), st.booleans(), max_size=3)),
    )
    for name in draw(st.lists(NAMES, max_size=1)):
        draw_message(draw, request.parameters[name])
    return request


class Caller:
    """A blocking client."""

    def __init__(self, address: str) -> None:
        self.channel = grpc.insecure_channel(address)
        self.stub: Any = rpc.GRPCInferenceServiceStub(self.channel)
        self.seen: Counter[str] = Counter()

    def one(self, request: pb.ModelInferRequest, timeout: float) -> None:
        """As a call of its own."""
        call = self.stub.ModelInfer.future(request, timeout=timeout)
        self._end("one", call.code().name if call.exception() else "OK", request)

    def together(self, requests: list[pb.ModelInferRequest], stop: int) -> None:
        """On one stream that is cancelled after `stop` messages; each answered by its id."""
        for number, request in enumerate(requests):
            request.id = str(number)
        call = self.stub.ModelStreamInfer(iter(requests), timeout=60)
        ended: set[str] = set()
        messages: Iterator[pb.ModelStreamInferResponse] = iter(call)
        try:
            for count, message in enumerate(messages):
                response = message.infer_response
                assert response.id not in ended, "a message after the last one"
                if is_final(response):
                    ended.add(response.id)
                    code = response.parameters["error_code"].string_param or "OK"
                    assert bool(message.error_message) is (code != "OK")
                    self._end("stream", code, requests[int(response.id)])
                if count == stop:
                    call.cancel()
        except grpc.RpcError:
            assert call.code() is grpc.StatusCode.CANCELLED, call.details()
            return
        assert len(ended) == len(requests)

    def _end(self, kind: str, code: str, request: pb.ModelInferRequest) -> None:
        assert code in ENDINGS, (kind, code, request)
        self.seen[f"{kind} {code}"] += 1


def fuzz(address: str, examples: int) -> Counter[str]:
    """Blocks until so many examples are through; what was seen of each ending."""
    caller = Caller(address)
    requests = st.one_of(wild(), likely(), likely())

    @settings(max_examples=examples, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(requests, st.lists(requests, max_size=5), st.integers(0, 60), st.sampled_from([30.0, 30.0, 0.01]))
    def check(alone: pb.ModelInferRequest, some: list[pb.ModelInferRequest], stop: int, timeout: float) -> None:
        caller.one(alone, timeout)
        caller.together(some, stop)

    try:
        check()
    finally:
        caller.channel.close()
    return caller.seen
