"""A request's life through a real gateway, with stand-in workers: every way in which it can end."""

import asyncio
import dataclasses
import sys
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from twostroke.services.gateway.generation import GenerationRequest, Piece, TextInput
from twostroke.services.grpc_setup import open_channel
from twostroke.v1 import inference_pb2 as pb
from twostroke.v1 import inference_pb2_grpc
from twostroke.v1 import worker_pb2 as wpb

from ..cluster import Cluster, cluster, cut_short, field_of, refusal, retry_s, text_request, token_ids, until
from ..stand_in_worker import EOS, Script, StandIn

Code = grpc.StatusCode
ANSWER = [*range(10, 40), EOS]


def prefill(**script: Any) -> StandIn:
    return StandIn("prefill", "p0", Script(**script))


def decode(**script: Any) -> StandIn:
    return StandIn("decode", "d0", Script(**script))


# How it goes when all is well


async def test_a_request_goes_to_both_workers_and_comes_back_once(tiny_llama_dir: Path) -> None:
    async with cluster(tiny_llama_dir, prefill(), decode()) as it:
        pieces = await it.collect(text_request())
        assert token_ids(pieces) == ANSWER
        finish = pieces[-1].finish
        assert finish.reason == pb.FINISH_REASON_STOP
        assert (finish.prefill_worker, finish.decode_worker) == ("p0", "d0")
        assert (finish.usage.prompt_tokens, finish.usage.output_tokens, finish.usage.cached_tokens) == (5, 31, 5)
        times = finish.timings
        assert (times.queue_us, times.prefill_us, times.transfer_us) == (1000, 2000, 3000)
        assert 0 < times.first_token_us <= times.total_us
        assert times.decode_us == pytest.approx(times.total_us - times.first_token_us, abs=2)
        await it.idle()
        p, d = it.worker("p0"), it.worker("d0")
        assert not p.cancels
        assert not d.cancels
        one, two = p.submits[0], d.submits[0]
        assert (one.work, two.work) == (wpb.WORK_PREFILL, wpb.WORK_DECODE)
        assert (one.peer.address, two.peer.address) == (d.address, p.address)
        assert (one.peer.incarnation, two.peer.incarnation) == (d.identity.incarnation, p.identity.incarnation)
        assert one.start_now
        assert one.params == two.params
        assert one.params.seed == finish.seed
        assert one.prompt_ids == two.prompt_ids
        assert one.params.max_tokens == 2048 - 5
        assert one.timeout_ms == 0


async def test_token_0_comes_from_the_prefill_worker_without_waiting(tiny_llama_dir: Path) -> None:
    async with cluster(tiny_llama_dir, prefill(), decode(mute_after=0)) as it:
        call = it.stub.Generate(text_request())
        first = await call.read()
        assert (first.first_index, list(first.token_ids)) == (0, ANSWER[:1])
        call.cancel()
        await it.idle()


@pytest.mark.parametrize("max_tokens", [2, None])
async def test_a_lost_token_0_of_the_prefill_worker_costs_nothing(tiny_llama_dir: Path, max_tokens: int | None) -> None:
    """Nor does one that comes late, when the decode worker has said all there is to say."""
    async with cluster(tiny_llama_dir, prefill(first_tokens=False), decode()) as it:
        pieces = await it.collect(text_request(max_tokens=max_tokens))
        assert token_ids(pieces) == ANSWER[:max_tokens]
        usage, times = pieces[-1].finish.usage, pieces[-1].finish.timings
        assert (usage.prompt_tokens, usage.cached_tokens) == (5, 5)
        assert (times.queue_us, times.prefill_us, times.transfer_us) == (1000, 2000, 3000)
        assert (pieces[-1].finish.prefill_worker, pieces[-1].finish.decode_worker) == ("p0", "d0")
        await it.idle()


async def test_repeated_messages_and_several_tokens_a_message(tiny_llama_dir: Path) -> None:
    async with cluster(tiny_llama_dir, prefill(twice=True), decode(twice=True, per_step=3)) as it:
        assert token_ids(await it.collect(text_request())) == ANSWER


async def test_token_0_can_be_the_end(tiny_llama_dir: Path) -> None:
    """The decode worker is told to stop: it would wait for a hand-over that is of no use."""
    async with cluster(tiny_llama_dir, prefill(tokens=[]), decode(tokens=[], mute_after=0)) as it:
        pieces = await it.collect(text_request())
        assert token_ids(pieces) == [EOS]
        assert "".join(piece.text for piece in pieces) == ""
        await it.idle()
        await until(lambda: it.worker("d0").cancels.total() == 1)


async def test_one_token_is_one_worker_s_work(tiny_llama_dir: Path) -> None:
    async with cluster(tiny_llama_dir, prefill(), decode()) as it:
        pieces = await it.collect(text_request(max_tokens=1))
        assert token_ids(pieces) == ANSWER[:1]
        assert pieces[-1].finish.reason == pb.FINISH_REASON_LENGTH
        assert (pieces[-1].finish.prefill_worker, pieces[-1].finish.decode_worker) == ("p0", "p0")
        assert it.worker("p0").submits[0].work == wpb.WORK_ALL
        assert not it.worker("d0").submits


@pytest.mark.parametrize("role", ["decode", "both"])
async def test_one_worker_alone_does_all(tiny_llama_dir: Path, role: str) -> None:
    async with cluster(tiny_llama_dir, StandIn(role, "w0")) as it:
        pieces = await it.collect(text_request(max_tokens=7))
        assert token_ids(pieces) == ANSWER[:7]
        assert (pieces[-1].finish.prefill_worker, pieces[-1].finish.decode_worker) == ("w0", "w0")
        assert it.worker("w0").submits[0].work == wpb.WORK_ALL
        await it.idle()
        assert not it.worker("w0").cancels


async def test_a_full_decode_worker_makes_the_prefill_worker_wait_for_the_ticket(tiny_llama_dir: Path) -> None:
    worker = StandIn("decode", "d0", pages=1)
    async with cluster(tiny_llama_dir, prefill(), worker) as it:
        await it.collect(text_request("x" * 15))
        await it.collect(text_request("x" * 16))
        assert [submit.start_now for submit in it.worker("p0").submits] == [True, False]


async def test_300_streams_at_once(tiny_llama_dir: Path) -> None:
    async with cluster(tiny_llama_dir, prefill(pause_s=0.001), decode(pause_s=0.001)) as it:
        answers = await asyncio.gather(*(it.collect(text_request(f"prompt {i}")) for i in range(300)))
        assert [token_ids(answer) for answer in answers] == [ANSWER] * 300
        await it.idle()
        assert len({submit.request for submit in it.worker("d0").submits}) == 300
        assert not it.worker("d0").cancels


# Stop strings


async def test_a_stop_string_cancels_at_both_workers(tiny_llama_dir: Path) -> None:
    async with cluster(tiny_llama_dir, prefill(), decode(mute_after=25)) as it:
        ids = it.gateway.lifecycle.model.tokenizer.encode("say STOP now")
        for worker in it.workers:
            worker.script = dataclasses.replace(worker.script, tokens=[*ids, *range(10, 100)])
        request = text_request()
        request.stopping.strings.append("STOP")
        pieces = await it.collect(request)
        assert "".join(piece.text for piece in pieces) == "say "
        finish = pieces[-1].finish
        assert (finish.reason, finish.stop_string) == (pb.FINISH_REASON_STOP, "STOP")
        assert (
            finish.usage.output_tokens
            == len(token_ids(pieces))
            == len(it.gateway.lifecycle.model.tokenizer.encode("say STOP"))
        )
        await it.idle()
        await until(lambda: it.worker("d0").cancels.total() == 1)


# Cancels and disconnects, in each phase


PHASES = {
    "before token 0": (prefill, {"mute_after": 0}, decode, {"mute_after": 0}, 0),
    "between token 0 and 1": (prefill, {}, decode, {"mute_after": 0}, 1),
    "while decoding": (prefill, {}, decode, {"mute_after": 12}, 12),
    "before the prefill worker spoke": (prefill, {"mute_after": 0}, decode, {"mute_after": 5}, 5),
}


@pytest.mark.parametrize("how", ["cancel", "disconnect", "deadline"])
@pytest.mark.parametrize("phase", list(PHASES))
async def test_a_cancel_frees_everything_in_every_phase(tiny_llama_dir: Path, phase: str, how: str) -> None:
    _, on_p, _, on_d, tokens = PHASES[phase]
    async with cluster(tiny_llama_dir, prefill(**on_p), decode(**on_d)) as it, open_channel(it.address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        given: list[float] = []

        def start(seconds: float | None = None) -> Any:
            given.append(seconds or 0.0)
            return stub.Generate(text_request(), timeout=seconds)

        def there() -> bool:
            return bool(it.worker("p0").submits and it.worker("d0").submits)

        if how == "deadline":
            assert (await cut_short(it, start, tokens, there)).code() is Code.DEADLINE_EXCEEDED
            assert 0 < it.worker("d0").submits[0].timeout_ms <= 1000 * given[-1] + 100  # gRPC rounds up on the wire
        else:
            call, seen = start(), 0
            while seen < tokens:
                piece = await call.read()
                seen += len(piece.token_ids)
            await until(there)
            if how == "cancel":
                call.cancel()
            else:
                await channel.close()
        await it.idle()
        number = it.worker("d0").submits[0].request
        await until(lambda: it.worker("p0").cancels[number] and it.worker("d0").cancels[number])


async def test_a_cancel_while_a_long_prompt_is_tokenized(tiny_llama_dir: Path) -> None:
    async with cluster(tiny_llama_dir, prefill(), decode()) as it:
        started, release = asyncio.Event(), asyncio.Event()
        model = it.gateway.lifecycle.model
        loop = asyncio.get_running_loop()

        class Slow:
            def encode(self, text: str) -> list[int]:
                loop.call_soon_threadsafe(started.set)
                asyncio.run_coroutine_threadsafe(release.wait(), loop).result()
                return [1]

        it.gateway.lifecycle.model = dataclasses.replace(model, tokenizer=Slow())  # type: ignore[arg-type]
        call = it.stub.Generate(text_request("x" * 5000))
        await started.wait()
        call.cancel()
        await until(lambda: it.gateway.admission.inside == 0)
        release.set()
        assert not it.worker("p0").submits


async def test_a_deadline_that_passed_on_arrival_costs_nothing(tiny_llama_dir: Path) -> None:
    async with cluster(tiny_llama_dir, prefill(), decode()) as it:
        assert (await refusal(it.collect(text_request(), timeout=-1))).code() is Code.DEADLINE_EXCEEDED

        async def send(_: Piece) -> None:
            raise AssertionError("it must not run")

        with pytest.raises(Exception, match="on arrival"):
            await it.gateway.lifecycle.generate(GenerationRequest(TextInput("x"), timeout_s=0.0), send)
        assert not it.worker("p0").submits


# Slow clients


async def test_a_client_that_reads_nothing_loses_its_stream_and_neighbours_do_not_notice(tiny_llama_dir: Path) -> None:
    tokens = [10 + i % 200 for i in range(2000)]
    workers = StandIn("both", "w0", Script(tokens=tokens, per_step=4))
    async with cluster(tiny_llama_dir, workers, slow_reader_s=0.3) as it:
        silent = it.stub.Generate(text_request("silent", logprobs=20))
        await silent.read()
        neighbour = await it.collect(text_request("neighbour"))
        assert len(token_ids(neighbour)) == 2001
        await it.idle()
        error = await refusal(drained(silent))
        assert error.code() is Code.RESOURCE_EXHAUSTED
        assert "slowly" in (error.details() or "")


async def test_a_full_buffer_ends_the_stream_at_once(tiny_llama_dir: Path) -> None:
    tokens = [10 + i % 200 for i in range(2000)]
    worker = StandIn("both", "w0", Script(tokens=tokens, per_step=4))
    async with cluster(tiny_llama_dir, worker, stream_buffer_bytes=1 << 18, slow_reader_s=600) as it:
        silent = it.stub.Generate(text_request("silent", logprobs=20))
        await silent.read()
        await it.idle()
        assert (await refusal(drained(silent))).code() is Code.RESOURCE_EXHAUSTED


async def drained(call: Any) -> None:
    """Reads to the end."""
    while await call.read() is not grpc.aio.EOF:
        pass


# Overload


async def test_more_than_the_queue_takes_is_refused_at_once(tiny_llama_dir: Path) -> None:
    async with cluster(tiny_llama_dir, prefill(), decode(mute_after=3), max_queue=2) as it:
        held = [it.stub.Generate(text_request()) for _ in range(2)]
        for call in held:
            await call.read()
        error = await refusal(it.collect(text_request()))
        assert error.code() is Code.RESOURCE_EXHAUSTED
        assert retry_s(error) > 0
        held[0].cancel()
        await until(lambda: it.gateway.admission.inside == 1)
        again = it.stub.Generate(text_request())
        assert (await again.read()).first_index == 0
        for call in (held[1], again):
            call.cancel()
        await it.idle()


# Failures of workers


@pytest.mark.parametrize(
    ("code", "text", "status"),
    [
        (wpb.FAILURE_CODE_INVALID, "never fits", Code.INVALID_ARGUMENT),
        (wpb.FAILURE_CODE_DEADLINE, "late", Code.DEADLINE_EXCEEDED),
        (wpb.FAILURE_CODE_WRITER_LOST, "the ticket expired", Code.UNAVAILABLE),
        (wpb.FAILURE_CODE_WRITER_LOST, "the prefill worker died", Code.UNAVAILABLE),
        (wpb.FAILURE_CODE_DRAINING, "draining", Code.UNAVAILABLE),
        (wpb.FAILURE_CODE_INTERNAL, "oops", Code.INTERNAL),
    ],
)
async def test_a_decode_worker_s_failure_without_replay(
    tiny_llama_dir: Path, code: wpb.FailureCode.ValueType, text: str, status: grpc.StatusCode
) -> None:
    once = {"max_attempts": 1, "replay_wait_s": 0.1}
    async with cluster(tiny_llama_dir, prefill(), decode(mute_after=0, fail=(code, text)), **once) as it:
        error = await refusal(it.collect(text_request()))
        assert error.code() is status
        assert text in (error.details() or "")
        assert (retry_s(error) > 0) == (status is Code.UNAVAILABLE)
        await it.idle()
        await until(lambda: it.worker("p0").cancels.total() >= 1)
        assert not it.worker("d0").cancels


@pytest.mark.parametrize(
    ("field", "told"),
    [("temperature", "sampling.temperature"), ("max_tokens", "stopping.max_tokens"), ("peer", ""), ("", "")],
)
@pytest.mark.parametrize("role", ["p0", "d0"])
async def test_the_field_that_a_worker_refuses_is_told(tiny_llama_dir: Path, role: str, field: str, told: str) -> None:
    workers = [prefill(mute_after=0), decode(mute_after=0)]
    async with cluster(tiny_llama_dir, *workers) as it:
        script = it.worker(role).script
        script.fail, script.fail_field = (wpb.FAILURE_CODE_INVALID, "it refuses"), field
        error = await refusal(it.collect(text_request()))
        assert (error.code(), error.details(), field_of(error)) == (Code.INVALID_ARGUMENT, "it refuses", told)
        await it.idle()


async def test_a_prefill_worker_s_failure_before_token_0_ends_the_attempt(tiny_llama_dir: Path) -> None:
    broken = prefill(mute_after=0, fail=(wpb.FAILURE_CODE_INTERNAL, "oops"))
    async with cluster(tiny_llama_dir, broken, decode(mute_after=0), max_attempts=1) as it:
        assert (await refusal(it.collect(text_request()))).code() is Code.INTERNAL
        await it.idle()
        await until(lambda: it.worker("d0").cancels.total() == 1)


async def test_a_prefill_worker_s_failure_after_the_decode_worker_spoke_does_not(tiny_llama_dir: Path) -> None:
    broken = prefill(pause_s=0.2, mute_after=0, fail=(wpb.FAILURE_CODE_INTERNAL, "oops"))
    async with cluster(tiny_llama_dir, broken, decode(pause_s=0.02)) as it:
        assert token_ids(await it.collect(text_request())) == ANSWER


async def test_a_dead_prefill_worker_is_survived_if_the_decode_worker_goes_on(tiny_llama_dir: Path) -> None:
    async with cluster(tiny_llama_dir, prefill(mute_after=0), decode(pause_s=0.02)) as it:
        call = it.stub.Generate(text_request())
        await call.read()
        await it.worker("p0").stop()
        last = None
        while (piece := await call.read()) is not grpc.aio.EOF:
            last = piece
        assert last is not None
        assert last.finish.usage.output_tokens == len(ANSWER)
        await it.idle()


async def test_a_killed_worker_process(tiny_llama_dir: Path) -> None:
    """The stand-in in a process of its own, killed while it streams; then another one at the same address."""
    script = Path(__file__).parent.with_name("stand_in_worker.py")

    async def spawn(address: str) -> tuple[asyncio.subprocess.Process, str]:
        process = await asyncio.create_subprocess_exec(
            sys.executable, str(script), "both", "w0", "0.02", address, stdout=asyncio.subprocess.PIPE
        )
        assert process.stdout is not None
        return process, (await process.stdout.readline()).decode().strip()

    process, address = await spawn("127.0.0.1:0")
    try:
        async with cluster(tiny_llama_dir, workers=[address]) as it:
            await it.ready(1)
            call = it.stub.Generate(text_request(max_tokens=20))
            pieces = [await call.read()]
            process.kill()
            await process.wait()
            await it.ready(0)
            assert (await refusal(it.collect(text_request()))).code() is Code.UNAVAILABLE
            process, _ = await spawn(address)
            while (piece := await call.read()) is not grpc.aio.EOF:
                pieces.append(piece)
            assert token_ids(pieces) == [10 + i % 200 for i in range(20)]
            await it.idle()
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def test_no_worker_says_why(tiny_llama_dir: Path) -> None:
    async with cluster(tiny_llama_dir, prefill(), StandIn("decode", "d0", kv_dtype="bfloat16"), connected=1) as it:
        await until(lambda: "refused" in it.gateway.fleet.unavailable().message)
        if it.gateway.fleet.can_decode:  # the decode worker came first
            assert "p0 refused: kv_dtype bfloat16 here, float32 there" in it.gateway.fleet.unavailable().message
            return
        error = await refusal(it.collect(text_request()))
        assert error.code() is Code.UNAVAILABLE
        assert "no decode worker" in (error.details() or "")
        assert "d0 refused: kv_dtype float32 here, bfloat16 there" in (error.details() or "")
        assert retry_s(error) > 0


async def test_a_draining_worker_gets_nothing_new(tiny_llama_dir: Path) -> None:
    async with cluster(tiny_llama_dir, StandIn("both", "w0"), StandIn("both", "w1")) as it:
        it.worker("w0").draining = True
        it.worker("w0").status(draining=True)
        await until(lambda: it.gateway.fleet.loads()[0].draining or it.gateway.fleet.loads()[1].draining)
        for _ in range(3):
            pieces = await it.collect(text_request())
            assert pieces[-1].finish.decode_worker == "w1"


async def test_loads_return_to_zero(tiny_llama_dir: Path) -> None:
    async with cluster(tiny_llama_dir, prefill(), decode(mute_after=3)) as it:
        calls = [it.stub.Generate(text_request(f"request {i}")) for i in range(5)]
        for call in calls:
            await call.read()
        for call in calls:
            call.cancel()
        await it.idle()
        await _loads_are_zero(it)


async def _loads_are_zero(it: Cluster) -> None:
    for load in it.gateway.fleet.loads():
        assert (load.waiting_tokens, load.sequences, load.free_pages) == (0, 0, load.pages)
