"""A native stream that fails after its first message says so in-band, then by its status."""

import asyncio
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from twostroke.errors import Unavailable
from twostroke.services.client.client import Client, Measured
from twostroke.services.gateway.answer import Answer
from twostroke.v1 import inference_pb2 as pb
from twostroke.v1 import worker_pb2 as wpb

from ...raw_http2 import connected
from ..cluster import cluster, cut_short, refusal, text_request, until
from ..stand_in_worker import Script, StandIn

Code = grpc.StatusCode


def worker(**script: Any) -> StandIn:
    return StandIn("both", "w0", Script(**script))


async def read(call: Any) -> tuple[list[pb.GenerateResponse], grpc.aio.AioRpcError | None]:
    """All messages, and how it failed."""
    pieces: list[pb.GenerateResponse] = []
    try:
        while isinstance(piece := await call.read(), pb.GenerateResponse):
            pieces.append(piece)
    except grpc.aio.AioRpcError as error:
        return pieces, error
    return pieces, None


@pytest.mark.parametrize(
    ("fault", "code", "reason"),
    [
        ("FAILURE_CODE_INVALID", Code.INVALID_ARGUMENT, "INVALID_REQUEST"),
        ("FAILURE_CODE_DEADLINE", Code.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED"),
        ("FAILURE_CODE_INTERNAL", Code.INTERNAL, "TWOSTROKE_ERROR"),
    ],
)
async def test_the_last_message_says_what_the_status_says(
    tiny_llama_dir: Path, fault: str, code: grpc.StatusCode, reason: str
) -> None:
    fail = (wpb.FailureCode.Value(fault), "it went wrong")
    async with cluster(tiny_llama_dir, worker(mute_after=5, fail=fail), max_attempts=1) as it:
        pieces, error = await read(it.stub.Generate(text_request()))
        assert error is not None
        assert error.code() is code
        *before, last = pieces
        assert [token for piece in before for token in piece.token_ids] == list(range(10, 15))
        assert not any(piece.HasField("error") or piece.HasField("finish") for piece in before)
        assert (last.error.code, last.error.message, last.error.reason) == (code.value[0], error.details(), reason)
        assert (last.first_index, list(last.token_ids), last.text) == (5, [], "")
        assert not last.HasField("finish")
        await it.idle()


async def test_one_that_fails_before_its_first_message_has_a_status_alone(tiny_llama_dir: Path) -> None:
    fail = (wpb.FAILURE_CODE_DEADLINE, "it went wrong")
    async with cluster(tiny_llama_dir, worker(mute_after=0, fail=fail)) as it:
        pieces, error = await read(it.stub.Generate(text_request()))
        assert not pieces
        assert error is not None
        assert error.code() is Code.DEADLINE_EXCEEDED
        await it.idle()


async def test_a_fault_of_ours_is_told_without_what_it_says(
    tiny_llama_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = Answer.piece

    def broken(self: Answer, tokens: Any, *rest: Any) -> Any:
        if self._count > 0:
            raise ValueError("a prompt's words")
        return whole(self, tokens, *rest)

    monkeypatch.setattr(Answer, "piece", broken)
    async with cluster(tiny_llama_dir, worker(pause_s=0.01)) as it:
        pieces, error = await read(it.stub.Generate(text_request()))
        assert error is not None
        assert error.code() is Code.INTERNAL
        assert pieces[-1].error.message == error.details() == "internal error (ValueError)"
        await it.idle()


async def test_a_gateway_that_stops_says_so(tiny_llama_dir: Path) -> None:
    async with cluster(tiny_llama_dir, worker(mute_after=3)) as it:
        call = it.stub.Generate(text_request(n=2, max_tokens=20))
        seen = 0
        while seen < 2 * 3:
            seen += len((await call.read()).token_ids)
        it.gateway.lifecycle.end_all(Unavailable("the gateway is shutting down", retry_after_s=1))
        pieces, error = await read(call)
        assert error is not None
        assert error.code() is Code.UNAVAILABLE
        assert (pieces[-1].error.code, pieces[-1].error.reason) == (14, "UNAVAILABLE")
        await it.idle()


def messages(body: bytes) -> list[pb.GenerateResponse]:
    """Of a call by hand."""
    told = []
    while len(body) >= 5:
        size = int.from_bytes(body[1:5])
        told.append(pb.GenerateResponse.FromString(body[5 : 5 + size]))
        body = body[5 + size :]
    return told


async def test_a_message_that_waits_for_its_reader_is_finished_before_the_error(tiny_llama_dir: Path) -> None:
    """The writer is in the middle of a message when the request fails; the client reads on a little later."""
    tokens = [10 + i % 200 for i in range(1900)]
    several = worker(tokens=tokens, per_step=4)
    async with cluster(tiny_llama_dir, several, stream_buffer_bytes=1 << 28) as it, connected(it.address) as connection:
        connection.hold()
        call = connection.call("/twostroke.v1.Inference/Generate", text_request(logprobs=20, n=2))
        await until(lambda: len(call.body) > 65_000)
        await asyncio.sleep(0.1)
        it.gateway.lifecycle.end_all(Unavailable("the gateway is shutting down", retry_after_s=1))
        await asyncio.sleep(0.05)
        connection.release()
        await connection.end_of(call)
        assert call.status == Code.UNAVAILABLE.value[0]
        *before, last = messages(call.body)
        assert (last.error.code, last.error.reason) == (14, "UNAVAILABLE")
        assert not any(piece.HasField("error") or piece.HasField("finish") for piece in before)
        for sample in range(2):
            told = [token for piece in before if piece.sample == sample for token in piece.token_ids]
            assert told == [token + 40 * sample for token in tokens[: len(told)]]
        await it.idle()


@pytest.mark.parametrize("answers", [1, 3])
async def test_whenever_it_fails_the_error_is_in_band(tiny_llama_dir: Path, answers: int) -> None:
    """At any moment of a stream that runs as fast as it can."""
    async with cluster(tiny_llama_dir, worker(tokens=[10 + i % 200 for i in range(200)])) as it:
        for count in range(1, 9):
            call = it.stub.Generate(text_request(n=answers))
            for _ in range(count):
                await call.read()
            it.gateway.lifecycle.end_all(Unavailable("the gateway is shutting down", retry_after_s=1))
            pieces, error = await read(call)
            assert error is not None
            assert error.code() is Code.UNAVAILABLE
            assert [piece.HasField("error") for piece in pieces] == [False] * (len(pieces) - 1) + [True]
        await it.idle()


async def test_an_answer_that_fails_beside_its_siblings_says_so(tiny_llama_dir: Path) -> None:
    """One of three is given up by the worker, while the others are being written."""
    script = worker(tokens=[10 + i % 200 for i in range(500)], pause_s=0.0005)
    async with cluster(tiny_llama_dir, script, max_attempts=1) as it:
        for _ in range(4):
            call = it.stub.Generate(text_request(n=3))
            await call.read()
            number = it.worker("w0").submits[-1].request
            failure = wpb.Failure(request=number, sample=1, code=wpb.FAILURE_CODE_INTERNAL, message="it broke")
            it.worker("w0").say(wpb.FromWorker(failure=failure))
            pieces, error = await read(call)
            assert error is not None
            assert error.code() is Code.INTERNAL
            assert "it broke" in pieces[-1].error.message
        await it.idle()


async def test_our_client_raises_the_status_and_yields_no_message_of_it(tiny_llama_dir: Path) -> None:
    fail = (wpb.FAILURE_CODE_DRAINING, "it drains")
    async with (
        cluster(tiny_llama_dir, worker(mute_after=4, fail=fail), replay_wait_s=0.1) as it,
        Client(it.address) as client,
    ):
        pieces: list[pb.GenerateResponse] = []

        async def ask() -> None:
            async for piece in client.generate(text_request(), None, Measured()):
                pieces.append(piece)

        with pytest.raises(Unavailable, match="it drains"):
            await ask()
        assert [list(piece.token_ids) for piece in pieces if not piece.token_ids] == []
        assert [token for piece in pieces for token in piece.token_ids] == list(range(10, 14))
        await it.idle()


async def test_a_cancelled_stream_leaves_nothing(tiny_llama_dir: Path) -> None:
    async with cluster(tiny_llama_dir, worker(mute_after=3)) as it:
        error = await cut_short(it, lambda s: it.stub.Generate(text_request(), timeout=s), 3, lambda: True)
        assert error.code() is Code.DEADLINE_EXCEEDED
        await it.idle()
        assert (await refusal(it.collect(text_request(), timeout=0.2))).code() is Code.DEADLINE_EXCEEDED
        await it.idle()
