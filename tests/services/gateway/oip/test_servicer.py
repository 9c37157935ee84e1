"""The Open Inference Protocol's door: what clients send and see, on one response or on a stream."""

import json
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from google.rpc import error_details_pb2

from twostroke import __version__
from twostroke.engine.tokenizer import Tokenizer
from twostroke.oip import grpc_service_pb2 as pb
from twostroke.oip import grpc_service_pb2_grpc as rpc

from ...cluster import Cluster, cluster, detail, field_of, refusal, retry_s, token_ids, until
from ...oip_client import add_input, collect, infer, is_final, read_output, stream, texts
from ...stand_in_worker import Script, StandIn

Code = grpc.StatusCode
TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def pair(**script: Any) -> tuple[StandIn, StandIn]:
    return StandIn("prefill", "p0", Script(**script)), StandIn("decode", "d0", Script(**script))


def stub(it: Cluster) -> Any:
    return rpc.GRPCInferenceServiceStub(it.channel)


async def native_text(it: Cluster, tokens: int) -> str:
    """What the native door answers to the same."""
    from ...cluster import text_request

    pieces = await it.collect(text_request("hello", max_tokens=tokens))
    token_ids(pieces)
    return "".join(piece.text for piece in pieces)


async def test_one_response_holds_the_whole_answer(tiny_llama_dir: Path) -> None:
    async with cluster(tiny_llama_dir, *pair()) as it:
        text = await native_text(it, 16)
        for raw in (True, False):
            for shape in ((1,), (1, 1)):
                response = await stub(it).ModelInfer(infer(raw=raw, shape=shape, id="mine", model="llama", version="1"))
                assert (response.model_name, response.model_version, response.id) == ("llama", "1", "mine")
                assert read_output(response, "text_output") == ["hello" + text]
                assert bool(response.raw_output_contents) is raw
                assert [tensor.name for tensor in response.outputs] == ["text_output"]
                assert not response.parameters
        response = await stub(it).ModelInfer(infer(exclude_input_in_output=True))
        assert (read_output(response, "text_output"), response.id) == ([text], "")
        await it.idle()


async def test_a_stream_s_pieces_make_the_same(tiny_llama_dir: Path) -> None:
    async with cluster(tiny_llama_dir, *pair()) as it:
        text = await native_text(it, 16)
        told = await collect(it.channel, infer(stream=True, id="a"), infer(stream=False, id="b"))
        assert texts(told["a"]) == [text]
        assert texts(told["b"]) == ["hello" + text]
        assert len(told["a"]) > 1
        assert len(told["b"]) == 1
        for name in "ab":
            assert [is_final(response) for response in told[name]] == [False] * (len(told[name]) - 1) + [True]
        typed = await collect(it.channel, infer(stream=True, raw=False))
        assert texts(typed[""]) == [text]
        await it.idle()


async def test_the_empty_final_response_comes_to_whoever_asks_for_it(tiny_llama_dir: Path) -> None:
    async with cluster(tiny_llama_dir, *pair()) as it:
        text = await native_text(it, 16)
        asked = {"triton_enable_empty_final_response": True}
        for streams in (True, False):
            told = (await collect(it.channel, infer(stream=streams, id="x", parameters=asked)))["x"]
            assert [is_final(response) for response in told] == [False] * (len(told) - 1) + [True]
            assert texts(told) == [text if streams else "hello" + text]
            assert (len(told[-1].outputs), told[-1].model_name, told[-1].model_version) == (0, "llama", "1")
        assert len(told) == 2


async def test_every_parameter_reaches_the_workers(tiny_llama_dir: Path) -> None:
    given: dict[str, Any] = {
        "temperature": 0.5,
        "top_k": 7,
        "top_p": 0.5,
        "min_p": 0.125,
        "typical_p": 0.25,
        "seed": 11,
        "repetition_penalty": 1.5,
        "presence_penalty": -1,
        "frequency_penalty": 2.0,
        "logit_bias": {"7": -2.5},
        "allowed_token_ids": [3, 7, 9],
        "banned_token_ids": [9],
        "bad_words": ["the"],
        "max_tokens": 9,
        "min_tokens": 4,
        "stop": ["zz"],
        "stop_token_ids": [30],
        "ignore_eos": True,
        "include_stop_str_in_output": True,
        "n": 2,
        "logprobs": 1,
        "cache_salt": "pepper",
        "priority": 3,
        "truncate_prompt_tokens": 2,
    }
    as_text = {k: v if isinstance(v, str) or k == "stop" else json.dumps(v) for k, v in given.items()}
    flat = {k: (v if isinstance(v, (int, float, str)) else json.dumps(v)) for k, v in given.items()}
    prompt = Tokenizer.from_dir(tiny_llama_dir).encode("hello")
    async with cluster(tiny_llama_dir, *pair()) as it:
        for request in (
            infer(sampling=given),
            infer(sampling=as_text),
            infer(parameters={**flat, "stop": "zz"}),
            infer(sampling=given, parameters={"temperature": 0.25, "min_tokens": "1"}),  # the tensor's go first
        ):
            await stub(it).ModelInfer(request, metadata=(("traceparent", TRACE),), timeout=60)
        for worker in it.workers:
            submits = worker.submits
            for submit in submits:
                params = submit.params
                assert (params.temperature, params.top_k, params.top_p, params.seed) == (0.5, 7, 0.5, 11)
                assert (params.min_p, params.typical_p, params.repetition_penalty) == (0.125, 0.25, 1.5)
                assert (params.presence_penalty, params.frequency_penalty) == (-1.0, 2.0)
                assert (list(params.bias_ids), list(params.bias_values)) == ([7], [-2.5])
                assert (list(params.allowed_ids), list(params.banned_ids)) == ([3, 7, 9], [9])
                assert len(params.bad_words) == 2
                assert (params.max_tokens, params.min_tokens, list(params.stop_token_ids)) == (9, 4, [30])
                assert (params.ignore_eos, params.logprobs, submit.samples) == (True, 1, 2)
                assert (submit.cache_salt, submit.traceparent) == (b"pepper", TRACE)
                assert (submit.priority, list(submit.prompt_ids)) == (3, prompt[-2:])
                assert 0 < submit.timeout_ms <= 61_000
            assert len(submits) == 4


async def test_defaults_are_the_backend_s(tiny_llama_dir: Path) -> None:
    async with cluster(tiny_llama_dir, *pair()) as it:
        await stub(it).ModelInfer(infer())
        params = it.worker("d0").submits[0].params
        assert (params.max_tokens, params.temperature, params.top_k, params.top_p) == (16, 1.0, 0, 1.0)
        assert not params.HasField("logprobs")
        await stub(it).ModelInfer(infer(parameters={"timeout": 50_000_000, "priority": 0, "sequence_id": 0}))
        assert 0 < it.worker("d0").submits[1].timeout_ms <= 50_000


async def test_special_tokens_can_be_part_of_the_text(tiny_llama_dir: Path) -> None:
    special = Tokenizer.from_dir(tiny_llama_dir).token_text(1)
    async with cluster(tiny_llama_dir, *pair(tokens=[10, 1, 11])) as it:
        for skip in (True, False):
            response = await stub(it).ModelInfer(infer(sampling={"skip_special_tokens": skip, "max_tokens": 3}))
            assert (special in (read_output(response, "text_output") or [""])[0]) is not skip


async def test_stop_strings_end_the_text(tiny_llama_dir: Path) -> None:
    async with cluster(tiny_llama_dir, *pair()) as it:
        text = await native_text(it, 16)
        stop = text[5:8]
        for given in ({"sampling": {"stop": stop}}, {"sampling": {"stop": [stop]}}, {"parameters": {"stop": stop}}):
            response = await stub(it).ModelInfer(
                infer(exclude_input_in_output=True, return_finish_reason=True, **given)  # type: ignore[arg-type]
            )
            assert read_output(response, "text_output") == [text[: text.index(stop)]]
            assert read_output(response, "finish_reason") == ["stop"]
        await it.idle()


EXTRAS = ("finish_reason", "cumulative_logprob", "logprobs", "num_input_tokens", "num_output_tokens")
FLAGS = {f"return_{name}": True for name in EXTRAS}


async def test_further_outputs(tiny_llama_dir: Path) -> None:
    prompt = len(Tokenizer.from_dir(tiny_llama_dir).encode("hello"))
    async with cluster(tiny_llama_dir, *pair()) as it:
        for raw in (True, False):
            asked: dict[str, Any] = {"sampling": {"max_tokens": 5, "logprobs": 2}, "raw": raw, **FLAGS}
            whole = await stub(it).ModelInfer(infer(**asked))
            assert read_output(whole, "finish_reason") == ["length"]
            assert read_output(whole, "cumulative_logprob") == [-2.5]
            assert read_output(whole, "num_input_tokens") == [prompt]
            assert read_output(whole, "num_output_tokens") == [5]
            [entries] = read_output(whole, "logprobs") or []
            read = json.loads(entries)
            assert len(read) == 5
            assert {token: (one["logprob"], one["rank"]) for token, one in read[0].items()} == {
                "10": (-0.5, None), "0": (-1.0, 1), "1": (-2.0, 2),
            }  # fmt: skip
            assert all(isinstance(one["decoded_token"], str) for one in read[0].values())
            pieces = (await collect(it.channel, infer(stream=True, **asked)))[""]
            counts = [read_output(piece, "num_output_tokens") for piece in pieces]
            assert sum(count[0] for count in counts if count) == 5
            reasons = [read_output(piece, "finish_reason") for piece in pieces]
            assert reasons == [["None"]] * (len(pieces) - 1) + [["length"]]
            assert read_output(pieces[-1], "cumulative_logprob") == [-2.5]
            told = [json.loads((read_output(piece, "logprobs") or [""])[0]) for piece in pieces]
            assert [entry for piece in told for entry in piece] == read
            assert all(read_output(piece, "num_input_tokens") == [prompt] for piece in pieces)


async def test_outputs_by_name(tiny_llama_dir: Path) -> None:
    async with cluster(tiny_llama_dir, *pair()) as it:
        named = await stub(it).ModelInfer(
            infer(outputs=["num_output_tokens", "cumulative_logprob"], return_finish_reason=True)
        )
        assert [tensor.name for tensor in named.outputs] == ["cumulative_logprob", "num_output_tokens"]
        assert read_output(named, "cumulative_logprob") == [-8.0]  # without logprobs being asked for
        none = await stub(it).ModelInfer(infer(return_logprobs=True))
        assert read_output(none, "logprobs") == ["null"]


async def test_several_answers_are_elements_of_one_tensor(tiny_llama_dir: Path) -> None:
    async with cluster(tiny_llama_dir, *pair()) as it:
        asked: dict[str, Any] = {"sampling": {"n": 3, "max_tokens": 6}, **FLAGS}
        whole = await stub(it).ModelInfer(infer(**asked, exclude_input_in_output=True))
        answers = read_output(whole, "text_output") or []
        assert len(set(answers)) == 3
        assert read_output(whole, "num_output_tokens") == [6, 6, 6]
        assert read_output(whole, "num_input_tokens") == [len(Tokenizer.from_dir(tiny_llama_dir).encode("hello"))]
        pieces = (await collect(it.channel, infer(stream=True, **asked)))[""]
        assert texts(pieces) == answers
        assert read_output(pieces[-1], "finish_reason") == ["length"] * 3
        columns = [read_output(piece, "num_output_tokens") or [] for piece in pieces]
        assert [sum(column) for column in zip(*columns, strict=True)] == [6, 6, 6]
        assert [is_final(piece) for piece in pieces] == [False] * (len(pieces) - 1) + [True]
        await it.idle()


async def test_what_it_says_of_itself(tiny_llama_dir: Path) -> None:
    prefill, decode = pair()
    decode.ready = False
    async with cluster(tiny_llama_dir, prefill, decode, connected=1) as it:
        door = stub(it)
        assert (await door.ServerLive(pb.ServerLiveRequest())).live
        assert not (await door.ServerReady(pb.ServerReadyRequest())).ready
        assert not (await door.ModelReady(pb.ModelReadyRequest(name="llama"))).ready
        decode.ready = True
        await it.ready(2)
        await until(lambda: it.gateway._is_serving())
        assert (await door.ServerReady(pb.ServerReadyRequest())).ready
        for name, version in (("llama", ""), ("llama", "1"), ("llama", "2"), ("x", "")):
            told = await door.ModelReady(pb.ModelReadyRequest(name=name, version=version))
            assert told.ready is (name == "llama" and version != "2")
        server = await door.ServerMetadata(pb.ServerMetadataRequest())
        assert (server.name, server.version, list(server.extensions)) == ("twostroke", __version__, ["parameters"])
        model = await door.ModelMetadata(pb.ModelMetadataRequest(name="llama"))
        assert (model.name, list(model.versions), model.platform) == ("llama", ["1"], "twostroke")
        inputs = {tensor.name: (tensor.datatype, list(tensor.shape)) for tensor in model.inputs}
        assert inputs["text_input"] == ("BYTES", [1])
        assert inputs["stream"] == ("BOOL", [1])
        outputs = {tensor.name: (tensor.datatype, list(tensor.shape)) for tensor in model.outputs}
        assert outputs["text_output"] == ("BYTES", [-1])
        error = await refusal(door.ModelMetadata(pb.ModelMetadataRequest(name="x")))
        assert (error.code(), "'llama' is" in (error.details() or "")) == (Code.NOT_FOUND, True)
        error = await refusal(door.ModelMetadata(pb.ModelMetadataRequest(version="3")))
        assert error.code() is Code.NOT_FOUND


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
    async with cluster(tiny_llama_dir, *pair(tokens=[10] * 400), max_message_bytes=1 << 16) as it:
        asked = infer(sampling={"max_tokens": 400, "logprobs": 20}, return_logprobs=True)
        error = await refusal(stub(it).ModelInfer(asked))
        assert error.code() is Code.INVALID_ARGUMENT
        assert "ask for a stream" in (error.details() or "")
        assert field_of(error) == "sampling_parameters.max_tokens"
        await it.idle()
        asked.CopyFrom(infer(sampling={"max_tokens": 400, "logprobs": 20}, return_logprobs=True, stream=True))
        pieces = (await collect(it.channel, asked))[""]
        assert sum(len(json.loads((read_output(piece, "logprobs") or ["[]"])[0])) for piece in pieces) == 400
