"""One stream with many requests: side by side, bounded, cancelled in every phase, with clients that do not read."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from twostroke.errors import InvalidRequest
from twostroke.oip import grpc_service_pb2 as pb
from twostroke.oip import grpc_service_pb2_grpc as rpc
from twostroke.services.gateway.guard import SlowReader
from twostroke.services.gateway.oip import infer_stream
from twostroke.services.gateway.oip.infer_stream import InferStream, failure
from twostroke.services.gateway.served_model import ServedModel
from twostroke.services.security.api_keys import new_key

from ...cluster import cluster, refusal, text_request, token_ids, until
from ...oip_client import Stream, collect, infer, is_final, read_output, stream, texts
from ...stand_in_worker import Script, StandIn

Code = grpc.StatusCode
LONG = {"max_tokens": 30}


async def drained(call: Any, told: list[pb.ModelStreamInferResponse] | None = None) -> None:
    """Reads to the end; `told` gets the messages."""
    while (message := await call.read()) is not grpc.aio.EOF:
        if told is not None:
            told.append(message)


async def test_requests_run_side_by_side_and_each_answer_has_its_id(tiny_llama_dir: Path) -> None:
    worker = StandIn("both", "w0", Script(pause_s=0.003))
    async with cluster(tiny_llama_dir, worker) as it:
        names = [f"r{number}" for number in range(40)]
        async with stream(it.channel) as both:
            await both.send(*(infer(f"hello {name}", stream=True, id=name, sampling=LONG) for name in names))
            await both.done(*names)
            await both.send(infer("late", stream=True, id="late"))  # the stream goes on
            await both.done("late")
        assert len({texts(both.responses[name])[0] for name in names}) == 1
        changes = sum(a != b for a, b in zip(both.order, both.order[1:], strict=False))
        assert changes > 2 * len(names), "one after the other"
        await it.idle()


async def test_a_closed_side_still_gets_its_answers(tiny_llama_dir: Path) -> None:
    async with cluster(tiny_llama_dir, StandIn("both", "w0", Script(pause_s=0.01))) as it:
        told = await collect(it.channel, infer(stream=True, id="a"), infer(id="b"))
        assert all(is_final(told[name][-1]) for name in "ab")
        assert not await collect(it.channel)  # nothing asked, nothing said


@pytest.mark.parametrize("after", ["nothing", "the first piece", "an error"])
async def test_a_cancel_ends_all_of_them(tiny_llama_dir: Path, after: str) -> None:
    prefill = StandIn("prefill", "p0", Script(mute_after=0 if after == "nothing" else 1))
    decode = StandIn("decode", "d0", Script(mute_after=0 if after == "nothing" else 1))
    async with cluster(tiny_llama_dir, prefill, decode) as it:
        both = Stream(it.channel)
        reading = asyncio.create_task(both.read())
        await both.send(*(infer(stream=number % 2 == 0, id=str(number)) for number in range(6)))
        await until(lambda: len(decode.submits) == 6)
        if after == "the first piece":
            await until(lambda: len(both.responses) == 3)
        elif after == "an error":
            await both.send(infer(id="bad", model="x"))
            await both.done("bad")
        assert it.gateway.admission.inside == 6
        both.call.cancel()
        await it.idle()
        await asyncio.gather(reading, return_exceptions=True)
        assert await both.call.code() is Code.CANCELLED


async def test_a_client_that_is_gone_is_noticed(tiny_llama_dir: Path) -> None:
    worker = StandIn("both", "w0", Script(mute_after=2))
    async with cluster(tiny_llama_dir, worker) as it:
        channel = grpc.aio.insecure_channel(it.address)
        both = Stream(channel)
        await both.send(infer(stream=True, id="a"), infer(id="b"))
        await until(lambda: len(worker.submits) == 2)
        await channel.close()
        await it.idle()


async def test_the_call_s_deadline_ends_it(tiny_llama_dir: Path) -> None:
    worker = StandIn("both", "w0", Script(mute_after=2))
    async with cluster(tiny_llama_dir, worker) as it:
        both = Stream(it.channel, timeout=0.4)
        await both.send(infer(stream=True, id="a"), infer(id="b"))
        error = await refusal(both.read())
        assert error.code() is Code.DEADLINE_EXCEEDED
        await it.idle()


async def test_so_many_at_once_and_no_more(tiny_llama_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(infer_stream, "MAX_IN_FLIGHT", 3)
    worker = StandIn("both", "w0", Script(pause_s=0.02))
    async with cluster(tiny_llama_dir, worker) as it, stream(it.channel) as both:
        await both.send(*(infer(stream=True, id=str(number)) for number in range(5)))
        await both.done("3", "4")
        for name in "34":
            assert both.errors[name] == "3 requests of this stream are being served already"
            assert both.responses[name][0].parameters["error_code"].string_param == "RESOURCE_EXHAUSTED"
        await both.done("0", "1", "2")
        await both.send(infer(stream=True, id="again"))
        await both.done("again")
        assert set(both.errors) == {"3", "4"}


async def test_a_client_that_reads_nothing_loses_its_stream(tiny_llama_dir: Path) -> None:
    worker = StandIn("both", "w0", Script(tokens=[10 + i % 200 for i in range(2000)], per_step=4))
    async with cluster(tiny_llama_dir, worker, slow_reader_s=0.3) as it:
        silent: Any = rpc.GRPCInferenceServiceStub(it.channel).ModelStreamInfer()
        asked: dict[str, Any] = {"sampling": {"max_tokens": 1900, "logprobs": 20}, "return_logprobs": True}
        for number in range(3):
            await silent.write(infer(stream=True, id=str(number), **asked))
        await silent.read()
        assert len(token_ids(await it.collect(text_request("neighbour")))) == 2001
        await it.idle()

        error = await refusal(drained(silent))
        assert (error.code(), error.details()) == (Code.RESOURCE_EXHAUSTED, "the client reads too slowly")


async def test_errors_for_a_client_that_reads_nothing_do_not_pile_up(
    tiny_llama_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[BaseException] = []
    serve = InferStream.serve

    async def watched(self: InferStream, requests: AsyncIterator[pb.ModelInferRequest]) -> None:
        try:
            await serve(self, requests)
        except BaseException as error:
            told.append(error)
            raise

    monkeypatch.setattr(InferStream, "serve", watched)
    async with cluster(tiny_llama_dir, StandIn("both", "w0"), slow_reader_s=0.3) as it:
        silent: Any = rpc.GRPCInferenceServiceStub(it.channel).ModelStreamInfer()
        bad = infer(id="x" * 100, sampling={"stop": ["y" * 300]})

        async def flood() -> None:
            while True:
                await silent.write(bad)

        writing = asyncio.create_task(flood())
        await until(lambda: len(told) == 1)
        assert isinstance(told[0], SlowReader)  # the server has done with it, while the client still writes
        writing.cancel()
        await asyncio.gather(writing, return_exceptions=True)
        await it.idle()


async def test_a_silent_stream_gives_signs_of_life(tiny_llama_dir: Path) -> None:
    worker = StandIn("both", "w0", Script(mute_after=2))
    async with cluster(tiny_llama_dir, worker, keep_alive_s=0.05) as it:
        both = Stream(it.channel)
        reading = asyncio.create_task(both.read())
        asked = infer(stream=True, id="a", return_finish_reason=True, return_num_output_tokens=True)
        await both.send(infer(id="whole"), asked)
        await until(lambda: len(both.responses.get("a", [])) > 5)
        last = both.responses["a"][-1]
        assert [read_output(last, name) for name in ("text_output", "finish_reason", "num_output_tokens")] == [
            [""], ["None"], [0],
        ]  # fmt: skip
        assert not is_final(last)
        assert "whole" not in both.responses
        both.call.cancel()
        await it.idle()
        await asyncio.gather(reading, return_exceptions=True)


async def test_draining_ends_what_is_left_in_band(tiny_llama_dir: Path) -> None:
    worker = StandIn("both", "w0", Script(mute_after=2))
    async with cluster(tiny_llama_dir, worker) as it, stream(it.channel) as both:
        await both.send(infer(stream=True, id="a"))
        await until(lambda: both.responses.get("a"))
        await it.gateway.drain(0.05, asyncio.Event())
        await both.done("a")
        assert both.errors["a"] == "the gateway is shutting down"
        await both.send(infer(stream=True, id="b"))
        await both.done("b")
        told = both.responses["b"][0].parameters
        assert told["error_code"].string_param == "UNAVAILABLE"
        assert told["error_retry_ms"].int64_param > 0


async def test_a_message_that_is_none_ends_the_call(tiny_llama_dir: Path) -> None:
    async with cluster(tiny_llama_dir, StandIn("both", "w0", Script(mute_after=1))) as it:
        call: Any = it.channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")()
        await call.write(infer(stream=True).SerializeToString())
        await call.read()
        await call.write(b"\x0a\x01\xff")

        assert (await refusal(drained(call))).code() is Code.INVALID_ARGUMENT
        await it.idle()


async def test_a_fault_of_ours_stays_with_its_request_and_tells_nothing(
    tiny_llama_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    honest = ServedModel.prompt_ids

    async def fail(self: ServedModel, source: Any) -> list[int]:
        if "secret" in getattr(source, "text", ""):
            raise ZeroDivisionError(f"cannot do {source}")
        return await honest(self, source)

    async with cluster(tiny_llama_dir, StandIn("both", "w0")) as it, stream(it.channel) as both:
        monkeypatch.setattr(ServedModel, "prompt_ids", fail)
        await both.send(infer("a secret", id="a"), infer("plain", id="b"))
        await both.done("a", "b")
        assert both.errors == {"a": "internal error (ZeroDivisionError)"}
        await it.idle()
    assert "ZeroDivisionError" in caplog.text
    assert "secret" not in caplog.text


async def test_a_withdrawn_key_ends_with_the_next_request(
    tiny_llama_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("twostroke.services.security.watched_file.LOOK_S", 0.0)
    path = tmp_path / "keys.jsonl"
    keys = {}
    for tenant in ("acme", "umbrella", "stays"):
        keys[tenant], kept = new_key(tenant)
        with path.open("a") as file:
            file.write(kept.line() + "\n")
    worker = StandIn("both", "w0", Script(pause_s=0.01))
    async with cluster(tiny_llama_dir, worker, api_keys=path) as it:
        error = await refusal(collect(it.channel, infer(id="x")))
        assert error.code() is Code.UNAUTHENTICATED
        door = rpc.GRPCInferenceServiceStub(it.channel)
        for call in (door.ModelInfer(infer()), door.ServerLive(pb.ServerLiveRequest())):
            assert (await refusal(call)).code() is Code.UNAUTHENTICATED
        salts = set()
        for tenant in ("acme", "umbrella"):
            metadata = (("authorization", f"Bearer {keys[tenant]}"),)
            async with stream(it.channel, metadata=metadata) as both:
                await both.send(infer(stream=True, id="a"))
                await until(lambda seen=both.responses: seen.get("a"))  # type: ignore[misc]
                path.write_text("".join(line for line in path.open() if f'"{tenant}"' not in line))
                await both.send(infer(stream=True, id="b"))
                await both.done("a", "b")
                assert set(both.errors) == {"b"}
                assert both.responses["b"][0].parameters["error_code"].string_param == "UNAUTHENTICATED"
            salts.add(worker.submits[-1].cache_salt)
        assert len(salts) == 2
        await it.idle()


# The stream alone


async def requests(*messages: pb.ModelInferRequest) -> AsyncIterator[pb.ModelInferRequest]:
    for message in messages:
        yield message


async def test_a_write_that_was_begun_is_let_through_and_one_that_waits_is_taken_back() -> None:
    """A call takes one write at a time: a request that ends early must not leave half a write behind."""
    sent: list[str] = []
    gate, started = asyncio.Event(), asyncio.Event()
    writing = 0

    async def send(message: pb.ModelStreamInferResponse) -> None:
        nonlocal writing
        writing += 1
        assert writing == 1
        started.set()
        await gate.wait()
        writing -= 1
        sent.append(message.error_message or message.infer_response.id)

    async def run(request: pb.ModelInferRequest, write: Callable[..., Awaitable[None]], _: Any) -> None:
        try:
            async with asyncio.timeout(None if request.id == "patient" else 0.05):
                await write(pb.ModelInferResponse(id=request.id))
        except TimeoutError:
            raise InvalidRequest("late") from None

    it = InferStream(run, send, slow_reader_s=10, keep_alive_s=0)
    serving = asyncio.create_task(
        it.serve(requests(*(pb.ModelInferRequest(id=name) for name in ("hasty", "hastier", "patient"))))
    )
    await started.wait()
    await asyncio.sleep(0.1)
    gate.set()
    await serving
    assert sent == ["hasty", "patient", "late", "late"]


async def test_an_error_that_cannot_be_told_ends_the_stream() -> None:
    async def send(_: Any) -> None:
        await asyncio.Event().wait()

    async def run(*_: Any) -> None:
        raise InvalidRequest("no")

    before = asyncio.all_tasks()
    with pytest.raises(SlowReader):
        await InferStream(run, send, slow_reader_s=0.05, keep_alive_s=0).serve(requests(pb.ModelInferRequest()))
    assert asyncio.all_tasks() == before


@pytest.mark.parametrize("begun", [True, False])
async def test_a_call_that_fails_as_a_whole_tells_each_request(tiny_llama_dir: Path, *, begun: bool) -> None:
    """Its status is lost on the way to some; before the first message that is all there is."""
    worker = StandIn("both", "w0", Script(mute_after=2 if begun else 0))
    async with cluster(tiny_llama_dir, worker) as it:
        plain: Any = it.channel.stream_stream(
            "/inference.GRPCInferenceService/ModelStreamInfer",
            response_deserializer=pb.ModelStreamInferResponse.FromString,
        )
        call = plain()
        for name in ("a", "b"):
            await call.write(infer(stream=True, id=name, sampling=LONG).SerializeToString())
        told: list[pb.ModelStreamInferResponse] = []
        while begun and len({each.infer_response.id for each in told}) < 2:
            told.append(await call.read())
        await until(lambda: len(it.worker("w0").submits) == 2)
        await call.write(b"\x0a\xff")
        assert (await refusal(drained(call, told))).code() is Code.INVALID_ARGUMENT
        failed = {each.infer_response.id: each for each in told if each.error_message}
        assert sorted(failed) == (["a", "b"] if begun else [])
        for each in failed.values():
            assert is_final(each.infer_response)
            assert each.infer_response.parameters["error_code"].string_param == "INVALID_ARGUMENT"
            assert "not a valid message" in each.error_message
        await it.idle()


async def test_a_call_that_breaks_ends_the_stream() -> None:
    async def send(_: Any) -> None:
        raise ConnectionError("gone")

    async def run(request: Any, write: Callable[..., Awaitable[None]], _: Any) -> None:
        await write(pb.ModelInferResponse())

    before = asyncio.all_tasks()
    with pytest.raises(ConnectionError):
        await InferStream(run, send, slow_reader_s=10, keep_alive_s=1).serve(requests(*[pb.ModelInferRequest()] * 3))
    assert asyncio.all_tasks() == before


def test_errors_name_the_request_as_far_as_that_can_be_done() -> None:
    assert failure("mine", InvalidRequest("m")).infer_response.id == "mine"
    assert failure("x" * 5000, InvalidRequest("m")).infer_response.id == "x" * 128
    assert len(failure("", InvalidRequest("m" * 5000)).error_message) == 1000
    assert failure("", InvalidRequest("")).error_message
