"""Generated messages of the engine door, and a client that sends them and checks how each call ends."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import grpc
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from twostroke.smg import vllm_engine_pb2 as pb
from twostroke.smg import vllm_engine_pb2_grpc as rpc

ENDINGS = {"OK", "INVALID_ARGUMENT", "ALREADY_EXISTS", "DEADLINE_EXCEEDED", "CANCELLED", "RESOURCE_EXHAUSTED"}
REASONS = {"stop", "length", "abort"}
IDS = ["", "a", "b", "c"]
SMALL = st.integers(0, 40)
TEXTS = st.one_of(st.text(max_size=30), st.sampled_from(["", "\0", *IDS, "{}", '{"type":"object"}', "a+", "(", "[1]"]))
FLOATS = st.one_of(st.floats(width=32), st.floats(0, 1, width=32), st.sampled_from([0.0, 0.5, 1.0, 2.0]))
SCALARS: dict[int, st.SearchStrategy[Any]] = {
    FieldDescriptor.TYPE_STRING: TEXTS,
    FieldDescriptor.TYPE_BOOL: st.booleans(),
    FieldDescriptor.TYPE_FLOAT: FLOATS,
    FieldDescriptor.TYPE_INT32: st.one_of(SMALL, SMALL, st.integers(-(1 << 31), (1 << 31) - 1)),
    FieldDescriptor.TYPE_SINT32: st.one_of(SMALL, SMALL, st.integers(-(1 << 31), (1 << 31) - 1)),
    FieldDescriptor.TYPE_UINT32: st.one_of(SMALL, SMALL, st.integers(0, (1 << 32) - 1)),
    FieldDescriptor.TYPE_UINT64: st.one_of(SMALL, st.integers(0, (1 << 64) - 1)),
}
WORTH = {"temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty",
         "min_tokens", "stop", "stop_token_ids", "skip_special_tokens", "ignore_eos", "n", "logprobs",
         "prompt_logprobs", "seed", "logit_bias", "include_stop_str_in_output"}  # fmt: skip
"""Sampling parameters that are honoured."""


def draw_message(draw: st.DrawFn, message: Message, only: set[str] | None = None, odds: int = 1) -> None:
    """Sets some fields of any message of the schema. `only`: of these; `odds`: of 1 to so many."""
    for field in message.DESCRIPTOR.fields:
        if (only is not None and field.name not in only) or draw(st.integers(0, odds)):
            continue
        value = getattr(message, field.name)
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            key = field.message_type.fields_by_name["key"].type
            value.update(draw(st.dictionaries(SCALARS[key], FLOATS, max_size=3)))
        elif field.message_type is not None and field.is_repeated:
            for _ in range(draw(st.integers(0, 2))):
                draw_message(draw, value.add())
        elif field.message_type is not None:
            value.SetInParent()
            draw_message(draw, value)
        elif field.is_repeated:
            value.extend(draw(st.lists(SCALARS[field.type], max_size=4)))
        else:
            setattr(message, field.name, draw(SCALARS[field.type]))


@st.composite
def wild(draw: st.DrawFn) -> pb.GenerateRequest:
    """Of any shape."""
    request = pb.GenerateRequest()
    draw_message(draw, request)
    return request


@st.composite
def likely(draw: st.DrawFn) -> pb.GenerateRequest:
    """Nearly right: so much of what follows runs."""
    request = pb.GenerateRequest(request_id=draw(st.sampled_from(IDS)), stream=draw(st.booleans()))
    if draw(st.booleans()):
        request.tokenized.input_ids.extend(draw(st.lists(st.integers(3, 250), min_size=1, max_size=40)))
    else:
        request.text = draw(st.text(min_size=1, max_size=30))
    draw_message(draw, request.sampling_params, WORTH, odds=5)
    request.sampling_params.max_tokens = draw(st.integers(1, 40))
    return request


class Caller:
    """A blocking client."""

    def __init__(self, address: str, timeout: float) -> None:
        self.channel = grpc.insecure_channel(address)
        self.stub: Any = rpc.VllmEngineStub(self.channel)
        self.timeout = timeout
        self.seen: Counter[str] = Counter()

    def play(self, requests: list[pb.GenerateRequest], aborted: list[str], stop: int) -> None:
        """Side by side; after `stop` messages of the first one these ids are aborted."""
        calls = [self.stub.Generate(request, timeout=self.timeout) for request in requests]
        for request, call in zip(requests, calls, strict=True):
            ends: dict[int, str] = {}
            try:
                for count, message in enumerate(self._messages(call, ends)):
                    if call is calls[0] and count == stop:
                        self.stub.Abort(pb.AbortRequest(request_ids=aborted), timeout=30)
                    if message.HasField("complete"):
                        ends[message.complete.index] = message.complete.finish_reason
            except grpc.RpcError:
                pass
            code = call.code().name
            assert code in ENDINGS, (code, call.details(), request)
            self.seen[code] += 1
            if code == "OK":
                assert sorted(ends) == list(range(request.sampling_params.n or 1)), request
                assert set(ends.values()) <= REASONS
                self.seen.update(ends.values())

    def _messages(self, call: Any, ends: dict[int, str]) -> Iterator[pb.GenerateResponse]:
        for message in call:
            told = message.chunk if message.HasField("chunk") else message.complete
            assert told.index not in ends, "a message after an answer's end"
            yield message


def fuzz(address: str, examples: int, timeout: float, *, scored: bool) -> Counter[str]:
    """Blocks until so many examples are through; how many calls ended how, and answers. `timeout`: of each call.
    `scored`: the workers can tell log-probabilities of prompts."""
    caller = Caller(address, timeout)
    requests = st.lists(st.one_of(wild(), likely(), likely(), likely()), min_size=1, max_size=4)

    @settings(max_examples=examples, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(requests, st.lists(st.sampled_from([*IDS, "nobody"]), max_size=6), st.integers(0, 4))
    def check(some: list[pb.GenerateRequest], aborted: list[str], stop: int) -> None:
        for request in () if scored else some:
            request.sampling_params.ClearField("prompt_logprobs")
        caller.play(some, aborted, stop)

    try:
        check()
    finally:
        caller.channel.close()
    return caller.seen
