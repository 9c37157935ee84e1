"""The native gRPC door: what clients send and see; bad input beside a neighbour."""

import asyncio
import gc
import math
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from twostroke.engine.request import Constraint, ConstraintKind, FinishReason
from twostroke.engine.tokenizer import Tokenizer
from twostroke.errors import InvalidRequest
from twostroke.services.gateway import inference
from twostroke.services.gateway.generation import Finish, Piece, Timings, TokenInput
from twostroke.services.gateway.inference import (
    Places,
    read_input,
    read_sampling,
    time_left,
    write_logprob,
    write_timings,
)
from twostroke.services.gateway.validation import MAX_MESSAGES
from twostroke.v1 import inference_pb2 as pb

from ..cluster import Cluster, cluster, field_of, refusal, retry_s, text_request, token_ids, until
from ..stand_in_worker import Script, StandIn

Code = grpc.StatusCode
TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def pair() -> tuple[StandIn, StandIn]:
    return StandIn("prefill", "p0"), StandIn("decode", "d0")


async def test_every_field_reaches_the_workers(tiny_llama_dir: Path) -> None:
    async with cluster(tiny_llama_dir, *pair()) as it:
        request = pb.GenerateRequest(
            model="llama",
            input=pb.Input(token_ids=pb.TokenIds(ids=[5, 6, 7])),
            sampling=pb.Sampling(temperature=0.5, top_k=7, top_p=0.9, seed=11),
            stopping=pb.Stopping(max_tokens=9, token_ids=[30, 31], ignore_eos=True),
            logprobs=2,
            request_id="mine",
        )
        call = it.stub.Generate(request, metadata=(("traceparent", TRACE),), timeout=60)
        pieces = [piece async for piece in call]
        assert dict(await call.trailing_metadata())["x-request-id"] == "mine"
        assert pieces[-1].finish.seed == 11
        for worker in it.workers:
            submit = worker.submits[0]
            assert list(submit.prompt_ids) == [5, 6, 7]
            params = submit.params
            assert (params.temperature, params.top_k, params.seed, params.max_tokens) == (0.5, 7, 11, 9)
            assert params.top_p == pytest.approx(0.9)
            assert (list(params.stop_token_ids), params.ignore_eos, params.logprobs) == ([30, 31], True, 2)
            assert submit.traceparent == TRACE
            assert 0 < submit.timeout_ms <= 61_000
        entry = pieces[0].logprobs[0]
        assert (entry.token_id, entry.logprob) == (10, -0.5)
        assert [(top.token_id, top.logprob) for top in entry.top] == [(0, -1.0), (1, -2.0)]


async def test_every_control_reaches_the_workers(tiny_llama_dir: Path) -> None:
    tokenizer = Tokenizer.from_dir(tiny_llama_dir)
    async with cluster(tiny_llama_dir, *pair()) as it:
        sampling = pb.Sampling(
            min_p=0.125,
            typical_p=0.5,
            repetition_penalty=1.5,
            presence_penalty=-1.0,
            frequency_penalty=2.0,
            logit_bias={7: -2.5, 3: 1.0},
            allowed_token_ids=[3, 7, 9],
            banned_token_ids=[9, 9],
            bad_words=["the"],
        )
        request = text_request(sampling=sampling)
        request.stopping.CopyFrom(pb.Stopping(max_tokens=9, min_tokens=4, strings=["x"], include_stop=True))
        await it.collect(request)
        for worker in it.workers:
            params = worker.submits[0].params
            assert (params.min_p, params.typical_p, params.repetition_penalty) == (0.125, 0.5, 1.5)
            assert (params.presence_penalty, params.frequency_penalty, params.min_tokens) == (-1.0, 2.0, 4)
            assert dict(zip(params.bias_ids, params.bias_values, strict=True)) == {7: -2.5, 3: 1.0}
            assert (list(params.allowed_ids), list(params.banned_ids)) == ([3, 7, 9], [9, 9])
            words = [list(word.ids) for word in params.bad_words]
            assert words == [tokenizer.encode("the"), tokenizer.encode(" the")]


def test_of_lists_that_are_too_long_only_the_beginning_is_read() -> None:
    sampling = read_sampling(
        pb.Sampling(
            allowed_token_ids=range(5000),
            banned_token_ids=range(5000),
            bad_words=["x"] * 5000,
            logit_bias=dict.fromkeys(range(5000), 1.0),
        )
    )
    lists = (sampling.allowed_token_ids, sampling.banned_token_ids, sampling.bad_words, sampling.logit_bias)
    assert [len(one) for one in lists] == [1025] * 4


@pytest.mark.parametrize(
    ("message", "read"),
    [
        (pb.Constraint(json_object=True), Constraint(ConstraintKind.JSON_OBJECT)),
        (
            pb.Constraint(json_schema='{"type": "integer"}'),
            Constraint(ConstraintKind.JSON_SCHEMA, '{"type": "integer"}'),
        ),
        (pb.Constraint(regex="a+"), Constraint(ConstraintKind.REGEX, "a+")),
        (
            pb.Constraint(choice=pb.Choice(texts=["ja", 'n"ein', "日"])),
            Constraint(ConstraintKind.CHOICE, '["ja", "n\\"ein", "日"]'),
        ),
        (pb.Constraint(grammar='start: "a"'), Constraint(ConstraintKind.GRAMMAR, 'start: "a"')),
    ],
)
def test_each_kind_of_constraint(message: pb.Constraint, read: Constraint) -> None:
    assert read_sampling(pb.Sampling(constraint=message)).constraint == read
    assert read_sampling(pb.Sampling()).constraint is None


@pytest.mark.parametrize("message", [pb.Constraint(), pb.Constraint(json_object=False)])
def test_a_constraint_that_is_none_is_refused(message: pb.Constraint) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read_sampling(pb.Sampling(constraint=message))
    assert caught.value.field == "sampling.constraint"


async def test_defaults_are_filled_in(tiny_llama_dir: Path) -> None:
    async with cluster(tiny_llama_dir, *pair()) as it:
        for _ in range(2):
            call = it.stub.Generate(text_request(), metadata=(("traceparent", "junk"),))
            pieces = [piece async for piece in call]
            assert re.fullmatch(r"[0-9a-f]{16}", dict(await call.trailing_metadata())["x-request-id"])
            assert not pieces[0].logprobs
        one, two = it.worker("p0").submits
        assert (one.params.temperature, one.params.top_k, one.params.top_p) == (1.0, 0, 1.0)
        assert not one.params.HasField("logprobs")
        assert one.params.seed != two.params.seed
        assert one.traceparent == ""


async def test_a_seed_of_0_and_a_temperature_of_0_are_given_not_absent(tiny_llama_dir: Path) -> None:
    async with cluster(tiny_llama_dir, *pair()) as it:
        request = text_request(sampling=pb.Sampling(temperature=0, seed=0))
        assert (await it.collect(request))[-1].finish.seed == 0
        assert it.worker("d0").submits[0].params.temperature == 0


def test_a_chat_of_too_many_turns_is_refused_before_anything_is_made_of_it() -> None:
    chat = pb.Chat(messages=[pb.ChatMessage()] * (MAX_MESSAGES + 1))
    with pytest.raises(InvalidRequest, match=f"{MAX_MESSAGES + 1} messages") as caught:
        read_input(pb.Input(chat=chat))
    assert caught.value.field == "input.chat.messages"
    ids = pb.TokenIds(ids=range(5))
    read = read_input(pb.Input(token_ids=ids))
    assert isinstance(read, TokenInput)
    assert list(read.ids) == [0, 1, 2, 3, 4]
    assert not isinstance(read.ids, (list, tuple)), "a copy, before anybody counted"


async def test_chat_goes_through_the_template(tiny_llama_dir: Path) -> None:
    tokenizer = Tokenizer.from_dir(tiny_llama_dir)
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="the cat")])
    async with cluster(tiny_llama_dir, *pair()) as it:
        await it.collect(pb.GenerateRequest(input=pb.Input(chat=chat)))
        expected = tokenizer.encode_chat([{"role": "user", "content": "the cat"}])
        assert list(it.worker("p0").submits[0].prompt_ids) == expected
        answer = await it.stub.Tokenize(pb.TokenizeRequest(input=pb.Input(chat=chat)))
        assert list(answer.token_ids) == expected


async def test_special_tokens_are_text_only_where_they_are_asked_for(tiny_llama_dir: Path) -> None:
    workers = [StandIn(role, name, Script(tokens=[10, 1, 11])) for role, name in (("prefill", "p0"), ("decode", "d0"))]
    async with cluster(tiny_llama_dir, *workers) as it:
        for told, mark in (
            ({}, ""),
            ({"skip_special_tokens": True}, ""),
            ({"skip_special_tokens": False}, "<|im_start|>"),
        ):
            pieces = await it.collect(text_request("x", **told))
            assert token_ids(pieces) == [10, 1, 11, 2]
            decode = it.gateway.lifecycle.model.tokenizer.token_text
            assert "".join(piece.text for piece in pieces) == decode(10) + mark + decode(11)


async def test_tokenize(tiny_llama_dir: Path) -> None:
    tokenizer = Tokenizer.from_dir(tiny_llama_dir)
    async with cluster(tiny_llama_dir) as it:
        for text in ("the cat é", "the cat " * 500, "x" * 4000):
            answer = await it.stub.Tokenize(pb.TokenizeRequest(model="llama", input=pb.Input(text=text)))
            assert list(answer.token_ids) == tokenizer.encode(text)
            assert list(answer.tokens) == [tokenizer.token_text(id_) for id_ in answer.token_ids]
        error = await refusal(it.stub.Tokenize(pb.TokenizeRequest(model="other", input=pb.Input(text="x"))))
        assert error.code() is Code.NOT_FOUND
        error = await refusal(it.stub.Tokenize(pb.TokenizeRequest()))
        assert (error.code(), field_of(error)) == (Code.INVALID_ARGUMENT, "input")


async def test_get_model(tiny_llama_dir: Path) -> None:
    async with cluster(tiny_llama_dir, *pair(), StandIn("both", "b0"), max_input=100, max_output=50) as it:
        model = await it.stub.GetModel(pb.GetModelRequest())
        assert (model.model, model.context_length) == ("llama", 2048)
        assert (model.max_input_tokens, model.max_output_tokens) == (100, 50)
        assert model.vocabulary_size == Tokenizer.from_dir(tiny_llama_dir).vocab_size
        assert list(model.eos_token_ids) == [0, 2]
        assert list(model.special_token_ids) == [0, 1, 2]
        assert model.has_chat_template
        assert (model.prefill_workers, model.decode_workers) == (2, 2)
        assert (await refusal(it.stub.GetModel(pb.GetModelRequest(model="x")))).code() is Code.NOT_FOUND


BAD: dict[str, tuple[pb.GenerateRequest, grpc.StatusCode, str]] = {
    "no input": (pb.GenerateRequest(), Code.INVALID_ARGUMENT, "input"),
    "empty text": (text_request(""), Code.INVALID_ARGUMENT, "input.text"),
    "unknown model": (text_request(model="gpt"), Code.NOT_FOUND, "model"),
    "NaN": (
        text_request(sampling=pb.Sampling(temperature=math.nan)), Code.INVALID_ARGUMENT, "sampling.temperature"
    ),
    "token id": (
        pb.GenerateRequest(input=pb.Input(token_ids=pb.TokenIds(ids=[1 << 31]))),
        Code.INVALID_ARGUMENT,
        "input.token_ids.ids[0]",
    ),
    "max_tokens 0": (text_request(max_tokens=0), Code.INVALID_ARGUMENT, "stopping.max_tokens"),
    "does not fit": (text_request("x" * 100, max_tokens=2000), Code.INVALID_ARGUMENT, "stopping.max_tokens"),
    "too many tokens": (text_request("x" * 2048), Code.INVALID_ARGUMENT, "input"),
    "4 MB": (text_request("x" * 4_000_000), Code.INVALID_ARGUMENT, "input.text"),
    "over the message limit": (text_request("x" * 4_300_000), Code.RESOURCE_EXHAUSTED, ""),
    "a million turns": (
        pb.GenerateRequest(input=pb.Input(chat=pb.Chat(messages=[pb.ChatMessage()] * 1_000_000))),
        Code.INVALID_ARGUMENT,
        "",
    ),
    "1,000 stop strings": (
        pb.GenerateRequest(input=pb.Input(text="x"), stopping=pb.Stopping(strings=["x"] * 1000)),
        Code.INVALID_ARGUMENT,
        "stopping.strings",
    ),
}  # fmt: skip


async def test_bad_input_gets_its_status_and_a_neighbour_does_not_notice(tiny_llama_dir: Path) -> None:
    prefill, decode = StandIn("prefill", "p0"), StandIn("decode", "d0", Script(pause_s=0.03))
    async with cluster(tiny_llama_dir, prefill, decode) as it:
        neighbour = asyncio.create_task(it.collect(text_request()))
        await until(lambda: decode.submits)
        large = [("grpc.max_send_message_length", 32 << 20)]
        async with grpc.aio.insecure_channel(it.address, options=large) as channel:
            client = Cluster(it.gateway, it.address, channel, it.workers)
            for name, (request, code, field) in BAD.items():
                error = await refusal(client.collect(request))
                assert (error.code(), field_of(error)) == (code, field), name
            error = await refusal(raw(channel, b"\x12\x05\x0a\x03a\xffc"))
            assert error.code() is Code.INVALID_ARGUMENT
            assert "UTF-8" in (error.details() or "")
        assert len(token_ids(await neighbour)) == 31
        assert len(decode.submits) == 1
        await it.idle()


async def raw(channel: grpc.aio.Channel, data: bytes) -> None:
    """Sends bytes that need not be a message."""
    call: Any = channel.unary_stream("/twostroke.v1.Inference/Generate")(data)
    async for _ in call:
        pass


async def test_what_no_worker_takes_is_refused(tiny_llama_dir: Path) -> None:
    prefill, decode = pair()
    decode.max_tokens = 64
    async with cluster(tiny_llama_dir, prefill, decode) as it:
        error = await refusal(it.collect(text_request("x" * 60, max_tokens=10)))
        assert (error.code(), field_of(error)) == (Code.INVALID_ARGUMENT, "stopping.max_tokens")
        error = await refusal(it.collect(text_request("x" * 64)))
        assert (error.code(), field_of(error)) == (Code.INVALID_ARGUMENT, "input")
        assert len(token_ids(await it.collect(text_request("x" * 60)))) == 4


# Silence


async def test_a_stream_that_waits_gets_messages_without_tokens(tiny_llama_dir: Path) -> None:
    """Before token 0 and after it; whatever ends the request then is told as ever."""
    prefill, decode = StandIn("prefill", "p0", Script(mute_after=0)), StandIn("decode", "d0", Script(mute_after=0))
    async with cluster(tiny_llama_dir, prefill, decode, keep_alive_s=0.05, max_attempts=1) as it:
        call = it.stub.Generate(text_request(n=2), timeout=60)
        pieces = aiter(call)
        for _ in range(3):
            assert await anext(pieces) == pb.GenerateResponse()
        call.cancel()
        await it.idle()
        decode.script.mute_after = 4
        call = it.stub.Generate(text_request(n=2), timeout=60)
        pieces, seen = aiter(call), [0, 0]
        while True:
            piece = await anext(pieces)
            assert piece.first_index == seen[piece.sample]
            seen[piece.sample] += len(piece.token_ids)
            if seen == [4, 4] and not piece.token_ids:
                break
        assert piece == pb.GenerateResponse(first_index=4)
        await decode.stop()
        error = await refusal(drained(pieces))
        assert error.code() is Code.UNAVAILABLE
        assert retry_s(error) > 0


async def drained(pieces: AsyncIterator[pb.GenerateResponse]) -> None:
    """Reads to the end; only signs of life come."""
    async for piece in pieces:
        assert not piece.token_ids
        assert not piece.HasField("finish")


def test_signs_of_life_are_of_an_answer_that_goes_on() -> None:
    places = Places()
    assert places.sign() == pb.GenerateResponse()
    places.note(Piece(first_index=0, token_ids=[5, 6], text="", logprobs=[]))
    places.note(Piece(first_index=0, token_ids=[7], text="", logprobs=[], sample=1))
    assert places.sign() == pb.GenerateResponse(first_index=2)
    end = Finish(FinishReason.STOP, "", 1, 0, 3, Timings(), 0, "p", "d")
    places.note(Piece(first_index=2, token_ids=[8], text="", logprobs=[], finish=end))
    assert places.sign() == pb.GenerateResponse(sample=1, first_index=1)


def test_small_conversions() -> None:
    assert [time_left(value) for value in (None, math.inf, 1.5, -1.0)] == [None, None, 1.5, -1.0]
    assert math.isnan(write_logprob(()).logprob)
    times = write_timings(Timings(queue=0.0, prefill=1e-9, total=1.5))
    assert (times.queue_us, times.prefill_us, times.total_us) == (0, 1, 1_500_000)


async def test_a_failure_after_a_cancel_is_nobodys(monkeypatch: pytest.MonkeyPatch) -> None:
    """What gRPC says of a client that is gone may come after we ceased to wait for it; nothing is logged of it."""
    monkeypatch.setattr(inference, "METADATA_S", 0.01)
    told: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))
    late = asyncio.Event()

    async def fails() -> None:
        await late.wait()
        raise RuntimeError("the client is gone")

    task = asyncio.create_task(inference.uninterrupted(fails()))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    late.set()
    for _ in range(3):
        await asyncio.sleep(0)
    gc.collect()
    assert not told
