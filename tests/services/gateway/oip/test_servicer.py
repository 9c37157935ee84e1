"""The Open Inference Protocol's door: what clients send and see, on one response or on a stream."""

import json
from pathlib import Path
from typing import Any

import grpc.aio

from twostroke import __version__
from twostroke.engine.tokenizer import Tokenizer
from twostroke.oip import grpc_service_pb2 as pb
from twostroke.oip import grpc_service_pb2_grpc as rpc

from ...cluster import Cluster, cluster, refusal, token_ids, until
from ...oip_client import collect, infer, is_final, read_output, texts
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
