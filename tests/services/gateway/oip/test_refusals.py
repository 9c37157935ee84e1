"""What the Open Inference door refuses, and how requests end otherwise than well: statuses, and in a stream in-band."""

import json
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from google.rpc import error_details_pb2

from twostroke.oip import grpc_service_pb2 as pb
from twostroke.oip import grpc_service_pb2_grpc as rpc

from ...cluster import Cluster, cluster, detail, field_of, refusal, retry_s, until
from ...oip_client import add_input, collect, infer, read_output, stream, texts
from ...stand_in_worker import Script, StandIn

Code = grpc.StatusCode


def pair(**script: Any) -> tuple[StandIn, StandIn]:
    return StandIn("prefill", "p0", Script(**script)), StandIn("decode", "d0", Script(**script))


def stub(it: Cluster) -> Any:
    return rpc.GRPCInferenceServiceStub(it.channel)


def doubled() -> pb.ModelInferRequest:
    request = infer()
    add_input(request, "text_input", b"again")
    return request


BAD: dict[str, tuple[pb.ModelInferRequest, grpc.StatusCode, str]] = {
    "no text": (infer(None, sampling={}), Code.INVALID_ARGUMENT, "text_input"),
    "empty text": (infer(""), Code.INVALID_ARGUMENT, "text_input"),
    "long text": (infer("x" * 3000), Code.INVALID_ARGUMENT, "text_input"),
    "long text, counted": (infer("x" * 3000, return_num_input_tokens=True), Code.INVALID_ARGUMENT, "text_input"),
    "batch": (infer(shape=(2,)), Code.INVALID_ARGUMENT, "text_input"),
    "twice": (doubled(), Code.INVALID_ARGUMENT, "text_input"),
    "unknown input": (infer(prompt=True), Code.INVALID_ARGUMENT, "inputs"),
    "image": (infer(image=True), Code.INVALID_ARGUMENT, "inputs"),
    "unknown output": (infer(outputs=["text"]), Code.INVALID_ARGUMENT, "outputs"),
    "unknown model": (infer(model="gpt"), Code.NOT_FOUND, "model_name"),
    "unknown version": (infer(version="2"), Code.NOT_FOUND, "model_version"),
    "id": (infer(id="é"), Code.INVALID_ARGUMENT, "id"),
    "no JSON": (infer(sampling="{"), Code.INVALID_ARGUMENT, "sampling_parameters"),
    "no object": (infer(sampling="[]"), Code.INVALID_ARGUMENT, "sampling_parameters"),
    "unknown key": (infer(sampling={"temprature": 1}), Code.INVALID_ARGUMENT, "sampling_parameters.temprature"),
    "unknown parameter": (infer(parameters={"top": 1}), Code.INVALID_ARGUMENT, "parameters.top"),
    "range": (infer(sampling={"top_p": 7}), Code.INVALID_ARGUMENT, "sampling_parameters.top_p"),
    "range of a parameter": (infer(parameters={"top_p": 7.0}), Code.INVALID_ARGUMENT, "parameters.top_p"),
    "type": (infer(sampling={"max_tokens": "many"}), Code.INVALID_ARGUMENT, "sampling_parameters.max_tokens"),
    "an element": (infer(sampling={"stop": ["a", ""]}), Code.INVALID_ARGUMENT, "sampling_parameters.stop[1]"),
    "does not fit": (infer("x" * 100, sampling={"max_tokens": 2000}), Code.INVALID_ARGUMENT, "max_tokens"),
    "not supported": (infer(sampling={"lora_name": "x"}), Code.INVALID_ARGUMENT, "sampling_parameters.lora_name"),
    "a prompt in a stream": (
        infer(stream=True, exclude_input_in_output=False), Code.INVALID_ARGUMENT, "exclude_input_in_output"
    ),
    "nothing left": (
        infer(parameters={"truncate_prompt_tokens": 0}), Code.INVALID_ARGUMENT, "parameters.truncate_prompt_tokens"
    ),
    "priority": (infer(parameters={"priority": 1 << 40}), Code.INVALID_ARGUMENT, "parameters.priority"),
    "sequence": (infer(parameters={"sequence_id": 5}), Code.INVALID_ARGUMENT, "parameters.sequence_id"),
}  # fmt: skip


async def test_bad_input_is_refused_by_name_and_in_a_stream_in_band(tiny_llama_dir: Path) -> None:
    prefill, decode = StandIn("prefill", "p0"), StandIn("decode", "d0", Script(pause_s=0.02))
    async with cluster(tiny_llama_dir, prefill, decode) as it, stream(it.channel) as both:
        await both.send(infer(stream=True, id="neighbour", sampling={"max_tokens": 25}))
        await until(lambda: decode.submits)
        for number, (name, (request, code, field)) in enumerate(BAD.items()):
            error = await refusal(stub(it).ModelInfer(request))
            if name == "a prompt in a stream":
                assert error.code() is code
            else:
                assert (error.code(), field_of(error)) == (code, field) or field_of(error).endswith(field), name
            assert error.details(), name
            request.id = request.id or str(number)
            if not request.id.isascii():
                continue
            await both.send(request)
            await both.done(request.id)
            [told] = both.responses[request.id]
            assert both.errors[request.id] == error.details()
            assert told.parameters["error_code"].string_param == code.name
            assert told.parameters["error_field"].string_param.endswith(field), name
        await both.done("neighbour")
        assert texts(both.responses["neighbour"])
        assert sum(1 for _ in decode.submits) == 1


async def test_a_stream_is_not_for_one_response(tiny_llama_dir: Path) -> None:
    async with cluster(tiny_llama_dir, *pair()) as it:
        error = await refusal(stub(it).ModelInfer(infer(stream=True)))
        assert error.code() is Code.UNIMPLEMENTED
        assert "ModelStreamInfer" in (error.details() or "")
        assert detail(error, error_details_pb2.ErrorInfo).reason == "UNSUPPORTED"
        assert not it.worker("d0").submits


async def test_deadlines(tiny_llama_dir: Path) -> None:
    async with cluster(tiny_llama_dir, *pair(mute_after=2)) as it:
        error = await refusal(stub(it).ModelInfer(infer(), timeout=0.3))
        assert error.code() is Code.DEADLINE_EXCEEDED
        error = await refusal(stub(it).ModelInfer(infer(parameters={"timeout": 200_000})))
        assert (error.code(), error.details()) == (Code.DEADLINE_EXCEEDED, "the deadline passed")
        async with stream(it.channel) as both:
            await both.send(infer(id="x", stream=True, parameters={"timeout": 200_000}), infer(id="bad", model="x"))
            await both.done("x", "bad")
            assert both.errors["x"] == "the deadline passed"
            assert texts(both.responses["x"][:-1])  # what came before
        await it.idle()


@pytest.mark.parametrize("mute_after", [0, 3])
async def test_a_cancel_frees_everything(tiny_llama_dir: Path, mute_after: int) -> None:
    async with cluster(tiny_llama_dir, *pair(mute_after=mute_after)) as it:
        call = stub(it).ModelInfer(infer())
        await until(lambda: len(it.worker("d0").submits) == 1)
        call.cancel()
        await it.idle()


async def test_requests_have_names_in_logs(tiny_llama_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    async with cluster(tiny_llama_dir, *pair()) as it:
        for name in ("mine", ""):
            call = stub(it).ModelInfer(infer("hush hush", id=name))
            assert (await call).id == name
            told = dict(await call.trailing_metadata())["x-request-id"]
            assert told == name or (not name and len(told) == 16)
            assert f"request {told}, answer 0" in caplog.text
    assert "hush" not in caplog.text


async def test_a_full_gateway_says_when_to_come_back(tiny_llama_dir: Path) -> None:
    async with cluster(tiny_llama_dir, *pair(pause_s=0.03), max_queue=1) as it, stream(it.channel) as both:
        await both.send(infer(id="first", stream=True))
        await until(lambda: both.responses.get("first"))
        error = await refusal(stub(it).ModelInfer(infer()))
        assert (error.code(), retry_s(error) > 0) == (Code.RESOURCE_EXHAUSTED, True)
        await both.send(infer(id="second", stream=True))
        await both.done("second")
        told = both.responses["second"][0].parameters
        assert told["error_code"].string_param == "RESOURCE_EXHAUSTED"
        assert told["error_retry_ms"].int64_param > 0
        await both.done("first")
        assert not both.errors.get("first")


async def test_an_answer_that_exceeds_a_message_is_refused_not_cut(tiny_llama_dir: Path) -> None:
    async with cluster(tiny_llama_dir, *pair(tokens=[10] * 400), max_answer_bytes=1 << 16) as it:
        asked = infer(sampling={"max_tokens": 400, "logprobs": 20}, return_logprobs=True)
        error = await refusal(stub(it).ModelInfer(asked))
        assert error.code() is Code.INVALID_ARGUMENT
        assert "ask for a stream" in (error.details() or "")
        assert field_of(error) == "sampling_parameters.max_tokens"
        await it.idle()
        asked.CopyFrom(infer(sampling={"max_tokens": 400, "logprobs": 20}, return_logprobs=True, stream=True))
        pieces = (await collect(it.channel, asked))[""]
        assert sum(len(json.loads((read_output(piece, "logprobs") or ["[]"])[0])) for piece in pieces) == 400
