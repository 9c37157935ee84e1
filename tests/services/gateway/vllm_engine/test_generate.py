"""Generate through the engine door: fields, chunks and ends, errors, slow readers."""

import asyncio
import json
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from twostroke.engine.tokenizer import Tokenizer
from twostroke.services.grpc_setup import open_channel
from twostroke.smg import vllm_engine_pb2 as pb
from twostroke.smg import vllm_engine_pb2_grpc
from twostroke.v1 import worker_pb2 as wpb

from ...cluster import field_of, refusal, until
from .engine_client import PROMPT, Engine, decode, ends, engine, prefill, request, tokens

Code = grpc.StatusCode
ANSWER = [*range(10, 40), 2]
TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


async def params_of(it: Engine, wanted: pb.GenerateRequest) -> wpb.SamplingParams:
    """What the workers were asked."""
    await it.all(wanted)
    return it.it.worker("p0").submits[-1].params


async def test_every_field_reaches_the_workers(tiny_llama_dir: Path) -> None:
    async with engine(tiny_llama_dir, prefill(), decode()) as it:
        wanted = request(
            "mine",
            temperature=0.5,
            top_p=0.75,
            top_k=7,
            min_p=0.125,
            frequency_penalty=1.5,
            presence_penalty=-1.0,
            repetition_penalty=1.25,
            max_tokens=9,
            min_tokens=4,
            stop=["never"],
            stop_token_ids=[30, 31],
            ignore_eos=True,
            logprobs=2,
            prompt_logprobs=0,
            seed=11,
            logit_bias={7: -2.5},
            regex="a+",
            skip_special_tokens=True,
            spaces_between_special_tokens=True,
            include_stop_str_in_output=True,
            grammar_from_first_token=True,
        )
        call = it.stub.Generate(wanted, metadata=(("traceparent", TRACE),), timeout=60)
        await until(lambda: it.it.worker("d0").submits)
        for name in ("p0", "d0"):
            submit = it.it.worker(name).submits[0]
            assert list(submit.prompt_ids) == PROMPT
            assert (submit.traceparent, 0 < submit.timeout_ms <= 61_000) == (TRACE, True)
            params = submit.params
            assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.5, 0.75, 7, 0.125)
            assert (params.frequency_penalty, params.presence_penalty, params.repetition_penalty) == (1.5, -1.0, 1.25)
            assert (params.max_tokens, params.min_tokens, list(params.stop_token_ids)) == (9, 4, [30, 31])
            assert (params.ignore_eos, params.logprobs, params.prompt_logprobs, params.seed) == (True, 2, 0, 11)
            assert (list(params.bias_ids), list(params.bias_values)) == ([7], [-2.5])
            assert (params.constraint.kind, params.constraint.text) == (wpb.CONSTRAINT_KIND_REGEX, "a+")
        call.cancel()


async def test_absent_and_zero_are_what_the_protocol_says(tiny_llama_dir: Path) -> None:
    async with engine(tiny_llama_dir, prefill(), decode()) as it:
        absent = await params_of(it, pb.GenerateRequest(tokenized=pb.TokenizedInput(input_ids=PROMPT)))
        assert (absent.temperature, absent.top_p, absent.top_k, absent.min_p) == (1.0, 1.0, 0, 0.0)
        assert (absent.repetition_penalty, absent.max_tokens) == (1.0, 2048 - len(PROMPT))
        assert not absent.HasField("logprobs")
        assert not absent.HasField("prompt_logprobs")
        assert not absent.HasField("constraint")
        zero = await params_of(it, request(temperature=0, logprobs=0, seed=0))
        assert (zero.temperature, zero.HasField("logprobs"), zero.logprobs, zero.seed) == (0.0, True, 0, 0)
        assert (await params_of(it, request(seed=-1))).seed == (1 << 64) - 1
        again = await params_of(it, request())
        assert again.seed != absent.seed  # drawn each time
        error = await refusal(it.all(request(max_tokens=0)))
        assert field_of(error) == "sampling_params.max_tokens"


CONSTRAINTS: dict[str, tuple[dict[str, Any], int, str]] = {
    "json_object": ({"json_object": True}, wpb.CONSTRAINT_KIND_JSON_OBJECT, ""),
    "json_schema": ({"json_schema": '{"type":"object"}'}, wpb.CONSTRAINT_KIND_JSON_SCHEMA, '{"type":"object"}'),
    "grammar": ({"grammar": 'start: "a"'}, wpb.CONSTRAINT_KIND_GRAMMAR, 'start: "a"'),
    "choice": (
        {"choice": pb.ChoiceConstraint(choices=["é", "no"])}, wpb.CONSTRAINT_KIND_CHOICE, json.dumps(["é", "no"])
    ),
}  # fmt: skip


async def test_constraints(tiny_llama_dir: Path) -> None:
    async with engine(tiny_llama_dir, prefill(), decode()) as it:
        for fields, kind, text in CONSTRAINTS.values():
            told = (await params_of(it, request(**fields))).constraint
            assert told.kind == kind
            assert (
                json.loads(told.text) == json.loads(text) if kind == wpb.CONSTRAINT_KIND_CHOICE else told.text == text
            )


async def test_a_stream_has_deltas_and_one_end(tiny_llama_dir: Path) -> None:
    async with engine(tiny_llama_dir, prefill(), decode()) as it:
        call = it.stub.Generate(request("mine"))
        messages = [message async for message in call]
        assert dict(await call.trailing_metadata())["x-request-id"] == "mine"
        assert tokens(messages) == ANSWER
        for message in messages[:-1]:
            assert message.chunk.prompt_tokens == len(PROMPT)
            assert message.chunk.completion_tokens == len(message.chunk.token_ids) > 0
            assert message.chunk.cached_tokens == 5  # as the script says
            assert not message.chunk.HasField("output_logprobs")
        end = ends(messages)[0]
        assert (end.finish_reason, end.prompt_tokens, end.cached_tokens) == ("stop", len(PROMPT), 5)
        assert list(end.output_ids) == list(messages[-2].chunk.token_ids)  # once more, as vLLM has it
        assert end.completion_tokens == len(end.output_ids)
        assert end.WhichOneof("matched_stop") is None  # the end of text is no stop token


async def test_whole_answers_come_at_the_end(tiny_llama_dir: Path) -> None:
    async with engine(tiny_llama_dir, prefill(), decode()) as it:
        messages = await it.all(request(stream=False, n=2, logprobs=2))
        assert [message.WhichOneof("response") for message in messages] == ["complete"] * 2
        found = ends(messages)
        assert list(found[0].output_ids) == ANSWER
        assert list(found[1].output_ids) == [token + 40 for token in range(10, 40)] + [2]
        for end in found.values():
            assert (end.finish_reason, end.completion_tokens, end.prompt_tokens) == ("stop", 31, len(PROMPT))
            assert list(end.output_logprobs.token_ids) == list(end.output_ids)
            assert list(end.output_logprobs.token_logprobs) == [-0.5] * 31
            assert len(end.output_logprobs.top_logprobs) == 31
            assert list(end.output_logprobs.top_logprobs[0].token_ids) == [0, 1]
            assert list(end.output_logprobs.top_logprobs[0].values) == [-1.0, -2.0]


async def test_answers_side_by_side_end_one_by_one(tiny_llama_dir: Path) -> None:
    async with engine(tiny_llama_dir, prefill(), decode(pause_s=0.002)) as it:
        messages = await it.all(request(n=3, max_tokens=12, logprobs=0))
        assert sorted(ends(messages)) == [0, 1, 2]
        for index in range(3):
            assert tokens(messages, index) == [token + 40 * index for token in range(10, 22)]
            assert ends(messages)[index].finish_reason == "length"
        chunk = messages[0].chunk
        assert list(chunk.output_logprobs.token_logprobs) == [-0.5]
        assert not chunk.output_logprobs.top_logprobs  # none were asked for


async def test_what_matched_is_told(tiny_llama_dir: Path) -> None:
    tokenizer = Tokenizer.from_dir(tiny_llama_dir)
    said = tokenizer.encode_plain("say STOP now")
    async with engine(tiny_llama_dir, prefill(tokens=said), decode(tokens=said)) as it:
        for stream in (True, False):
            end = ends(await it.all(request(stream=stream, stop=["STOP"])))[0]
            assert (end.finish_reason, end.matched_stop_str) == ("stop", "STOP")
            end = ends(await it.all(request(stream=stream, stop_token_ids=[2])))[0]
            assert (end.finish_reason, end.matched_token_id) == ("stop", 2)
        messages = await it.all(request(stop=["STOP"], include_stop_str_in_output=True))
        assert tokens(messages) == said[: len(tokenizer.encode_plain("say STOP"))]


async def test_text_is_tokenized_here(tiny_llama_dir: Path) -> None:
    ids = Tokenizer.from_dir(tiny_llama_dir).encode("hello world")
    async with engine(tiny_llama_dir, prefill(), decode()) as it:
        messages = await it.all(pb.GenerateRequest(text="hello world", stream=True))
        assert list(it.it.worker("p0").submits[0].prompt_ids) == ids
        assert messages[0].chunk.prompt_tokens == len(ids)
        error = await refusal(it.all(pb.GenerateRequest(text="")))
        assert (error.code(), field_of(error)) == (Code.INVALID_ARGUMENT, "text")


REFUSED: dict[str, tuple[pb.GenerateRequest, str]] = {
    "nothing": (pb.GenerateRequest(), "input"),
    "no tokens": (request(ids=[]), "tokenized.input_ids"),
    "an unknown token": (request(ids=[1 << 31]), "tokenized.input_ids[0]"),
    "too many tokens": (request(ids=[5] * 2048), "tokenized.input_ids"),
    "a long name": (request("x" * 129), "request_id"),
    "a name that is not printable": (request("\n"), "request_id"),
    "temperature": (request(temperature=-1), "sampling_params.temperature"),
    "NaN": (request(min_p=float("nan")), "sampling_params.min_p"),
    "top_p": (request(top_p=1.5), "sampling_params.top_p"),
    "top_k": (request(top_k=(1 << 32) - 1), "sampling_params.top_k"),
    "stop": (request(stop=["x"] * 1000), "sampling_params.stop"),
    "an empty stop": (request(stop=[""]), "sampling_params.stop[0]"),
    "stop tokens": (request(stop_token_ids=[1 << 31]), "sampling_params.stop_token_ids[0]"),
    "max_tokens": (request(max_tokens=1 << 31), "sampling_params.max_tokens"),
    "min_tokens": (request(max_tokens=2, min_tokens=3), "sampling_params.min_tokens"),
    "all log-probabilities": (request(logprobs=-1), "sampling_params.logprobs"),
    "those of the prompt": (request(prompt_logprobs=21), "sampling_params.prompt_logprobs"),
    "very many answers": (request(n=(1 << 32) - 1), "sampling_params.n"),
    "bias": (request(logit_bias={-1: 1.0}), "sampling_params.logit_bias[-1]"),
    "structural_tag": (request(structural_tag="{}"), "sampling_params.structural_tag"),
    "json_object": (request(json_object=False), "sampling_params.json_object"),
    "truncate_prompt_tokens": (request(truncate_prompt_tokens=-1), "sampling_params.truncate_prompt_tokens"),
    "choices": (request(choice=pb.ChoiceConstraint(choices=["a"] * 70_000)), "sampling_params.choice"),
    "mm_inputs": (pb.GenerateRequest(text="x", mm_inputs=pb.MultimodalInputs()), "mm_inputs"),
    "extra_mm_inputs": (pb.GenerateRequest(text="x", extra_mm_inputs=[pb.MultimodalInputs()]), "extra_mm_inputs"),
    "media_refs": (pb.GenerateRequest(text="x", media_refs=pb.MediaRefs()), "media_refs"),
    "kv_transfer_params": (
        pb.GenerateRequest(text="x", kv_transfer_params=pb.KvTransferParams()), "kv_transfer_params"
    ),
    "kv_transfer_params_json": (pb.GenerateRequest(text="x", kv_transfer_params_json="{}"), "kv_transfer_params_json"),
    "another rank": (pb.GenerateRequest(text="x", data_parallel_rank=1), "data_parallel_rank"),
}  # fmt: skip


async def test_what_is_wrong_is_refused_by_its_own_name(tiny_llama_dir: Path) -> None:
    async with engine(tiny_llama_dir, prefill(), decode()) as it:
        for name, (wanted, field) in REFUSED.items():
            error = await refusal(it.all(wanted))
            assert (error.code(), field_of(error)) == (Code.INVALID_ARGUMENT, field), name
        assert not it.it.worker("d0").submits
        harmless = pb.GenerateRequest(text="x", kv_transfer_params_json="", data_parallel_rank=0)
        assert ends(await it.all(harmless))


async def test_an_error_is_a_status_and_after_the_first_chunk_in_band_too(tiny_llama_dir: Path) -> None:
    fail = (wpb.FAILURE_CODE_DEADLINE, "the deadline passed")
    async with engine(tiny_llama_dir, prefill(), decode(mute_after=5, fail=fail)) as it:
        messages: list[pb.GenerateResponse] = []
        call = it.stub.Generate(request(n=2))

        async def read() -> None:
            async for message in call:
                messages.append(message)

        assert (await refusal(read())).code() is Code.DEADLINE_EXCEEDED
        assert {index: end.finish_reason for index, end in ends(messages).items()} == {0: "error", 1: "error"}
        assert dict(await call.trailing_metadata())["x-request-id"]
        messages.clear()
        call = it.stub.Generate(request(stream=False))
        assert (await refusal(read())).code() is Code.DEADLINE_EXCEEDED
        assert not messages


async def test_a_deadline_and_a_client_that_leaves(tiny_llama_dir: Path) -> None:
    async with engine(tiny_llama_dir, prefill(mute_after=0), decode(mute_after=0)) as it:
        assert (await refusal(it.all(request(), timeout=0.2))).code() is Code.DEADLINE_EXCEEDED
        call = it.stub.Generate(request("gone"))
        await until(lambda: len(it.it.worker("d0").submits) == 2)
        call.cancel()
        await it.it.idle()
        await until(lambda: it.it.worker("d0").cancels.total() >= 2)


async def test_when_nobody_can_decode(tiny_llama_dir: Path) -> None:
    async with engine(tiny_llama_dir, prefill()) as it:
        error = await refusal(it.all(request()))
        assert error.code() is Code.UNAVAILABLE
        health = await it.stub.HealthCheck(pb.HealthCheckRequest())
        assert (health.healthy, "no decode worker" in health.message) == (False, True)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_silent_stream_gets_chunks_without_tokens(tiny_llama_dir: Path, *, stream: bool) -> None:
    async with engine(tiny_llama_dir, prefill(pause_s=0.35), decode(pause_s=0.35), keep_alive_s=0.1) as it:
        messages = await it.all(request(stream=stream, max_tokens=2))
        quiet = [m for m in messages if m.HasField("chunk") and not m.chunk.token_ids]
        assert bool(quiet) is stream
        assert all(m.chunk.prompt_tokens == len(PROMPT) for m in quiet)
        assert ends(messages)[0].finish_reason == "length"
        assert not stream or tokens(messages) == [10, 11]


async def test_a_client_that_does_not_read_loses_its_stream(tiny_llama_dir: Path) -> None:
    many = {"tokens": [10 + i % 200 for i in range(2000)]}
    async with (
        engine(tiny_llama_dir, prefill(**many), decode(**many), slow_reader_s=0.5) as it,
        open_channel(it.it.address) as channel,
    ):
        call = vllm_engine_pb2_grpc.VllmEngineStub(channel).Generate(request(logprobs=20, max_tokens=1900))
        await call.read()
        await it.it.idle()

        async def rest() -> None:
            while await call.read() is not grpc.aio.EOF:
                pass

        error = await refusal(rest())
        assert error.code() is Code.RESOURCE_EXHAUSTED
        assert "reads too slowly" in (error.details() or "")


async def test_an_answer_that_is_too_large_for_a_message(tiny_llama_dir: Path) -> None:
    many = {"tokens": [10 + i % 200 for i in range(2000)], "per_step": 100}
    async with engine(tiny_llama_dir, prefill(**many), decode(**many), max_answer_bytes=1 << 16) as it:
        error = await refusal(it.all(request(stream=False, logprobs=20, max_tokens=1900)))
        assert (error.code(), field_of(error)) == (Code.INVALID_ARGUMENT, "stream")
        assert len(tokens(await it.all(request(logprobs=20, max_tokens=1900)))) == 1900


async def test_a_drain_ends_streams_in_band_and_says_so(tiny_llama_dir: Path) -> None:
    async with engine(tiny_llama_dir, prefill(), decode(mute_after=5)) as it:
        call = it.stub.Generate(request())
        messages = [await call.read()]
        await it.it.gateway.drain(0.1, asyncio.Event())
        assert not (await it.stub.HealthCheck(pb.HealthCheckRequest())).healthy
        assert (await it.stub.GetServerInfo(pb.GetServerInfoRequest())).is_paused

        async def rest() -> None:
            while (message := await call.read()) is not grpc.aio.EOF:
                messages.append(message)

        assert (await refusal(rest())).code() is Code.UNAVAILABLE
        assert ends(messages)[0].finish_reason == "error"
