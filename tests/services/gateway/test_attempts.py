"""Replay: workers die, hang, drain and fail under streams that go on without a gap or a repeat."""

import asyncio
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from twostroke.services.gateway.answer import WorkerReport
from twostroke.services.gateway.attempts import merged
from twostroke.services.identity import draw_identity
from twostroke.v1 import inference_pb2 as pb
from twostroke.v1 import worker_pb2 as wpb

from ..cluster import Cluster, cluster, refusal, retry_s, text_request, token_ids, until
from ..stand_in_worker import EOS, Script, StandIn

Code = grpc.StatusCode
ANSWER = [*range(10, 40), EOS]
LOST = (wpb.FAILURE_CODE_WRITER_LOST, "the prefill worker is gone")
DRAINING = (wpb.FAILURE_CODE_DRAINING, "the worker is draining")
INTERNAL = (wpb.FAILURE_CODE_INTERNAL, "oops")


def stand_in(name: str, **script: Any) -> StandIn:
    role = {"p": "prefill", "d": "decode", "b": "both"}[name[0]]
    return StandIn(role, name, Script(**script))


async def rest(call: Any, pieces: list[pb.GenerateResponse]) -> list[int]:
    """Reads to the end; all tokens, each index once."""
    while (piece := await call.read()) is not grpc.aio.EOF:
        pieces.append(piece)
    return token_ids(pieces)


def submits(it: Cluster, attempt: int) -> list[tuple[str, wpb.Submit]]:
    """What the workers were sent of an attempt."""
    return [(worker.name, submit) for worker in it.workers for submit in worker.submits if submit.attempt == attempt]


async def test_a_dead_decode_worker_s_streams_go_on_at_another(tiny_llama_dir: Path) -> None:
    workers = [stand_in("p0"), stand_in("d0", mute_after=7), stand_in("d1", mute_after=7, fail_attempts=1)]
    workers[1].script.fail_attempts = 1
    async with cluster(tiny_llama_dir, *workers) as it:
        request = text_request(logprobs=2)
        call = it.stub.Generate(request)
        pieces = [await call.read()]
        while sum(len(piece.token_ids) for piece in pieces) < 7:
            pieces.append(await call.read())
        victim = next(worker for worker in workers if worker.name != "p0" and worker.submits)
        other = "d1" if victim.name == "d0" else "d0"
        await victim.stop()
        assert await rest(call, pieces) == ANSWER
        assert sum(len(piece.logprobs) for piece in pieces) == len(ANSWER)
        finish = pieces[-1].finish
        assert (finish.prefill_worker, finish.decode_worker, finish.replays) == ("p0", other, 1)
        assert (finish.usage.prompt_tokens, finish.usage.cached_tokens, finish.usage.output_tokens) == (5, 5, 31)
        assert 0 < finish.timings.first_token_us <= finish.timings.total_us
        again = submits(it, 1)
        assert sorted(name for name, _ in again) == sorted(["p0", other])
        first = it.worker("p0").submits[0]
        for _, submit in again:
            assert list(submit.output_ids) == ANSWER[:7]
            assert submit.first_index == 7
            assert (submit.request, submit.params, submit.prompt_ids) == (
                first.request,
                first.params,
                first.prompt_ids,
            )
        assert it.worker("p0").cancels.total() == 1  # its part of attempt 0
        await it.idle()


async def test_a_text_and_its_stop_string_span_a_replay(tiny_llama_dir: Path) -> None:
    workers = [stand_in("p0"), stand_in("d0", mute_after=6, fail=INTERNAL, fail_attempts=1)]
    async with cluster(tiny_llama_dir, *workers) as it:
        ids = it.gateway.lifecycle.model.tokenizer.encode("say STOP now")
        assert len(ids) > 7
        for worker in workers:
            worker.script.tokens = [*ids, *range(10, 40)]
        request = text_request()
        request.stopping.strings.append("STOP")
        pieces = await it.collect(request)
        assert "".join(piece.text for piece in pieces) == "say "
        assert pieces[-1].finish.stop_string == "STOP"
        assert pieces[-1].finish.replays == 1
        await it.idle()


@pytest.mark.parametrize("failure", [LOST, INTERNAL, (wpb.FAILURE_CODE_WRITER_LOST, "the ticket expired")])
async def test_a_failure_of_the_decode_worker_is_replayed(tiny_llama_dir: Path, failure: Any) -> None:
    workers = [stand_in("p0"), stand_in("p1"), stand_in("d0", mute_after=0, fail=failure, fail_attempts=2)]
    async with cluster(tiny_llama_dir, *workers) as it:
        pieces = await it.collect(text_request())
        assert token_ids(pieces) == ANSWER
        assert pieces[-1].finish.replays == 2
        await it.idle()
        used = [{name for name, _ in submits(it, attempt)} - {"d0"} for attempt in (0, 1, 2)]
        if failure[0] == wpb.FAILURE_CODE_WRITER_LOST:
            assert sorted(map(sorted, used)) == [[], ["p0"], ["p1"]]  # each once, then the decode worker alone
        else:
            assert set().union(*used) <= {"p0", "p1"}


async def test_a_prefill_worker_that_fails_early_is_avoided(tiny_llama_dir: Path) -> None:
    bad, good, decode = stand_in("p0", mute_after=0, fail=INTERNAL), stand_in("p1"), stand_in("d0", pause_s=0.05)
    async with cluster(tiny_llama_dir, bad, good, decode) as it:
        pieces = await it.collect(text_request())
        assert token_ids(pieces) == ANSWER
        assert pieces[-1].finish.prefill_worker == "p1"
        await it.idle()


async def test_nothing_is_replayed_while_the_decode_worker_answers(tiny_llama_dir: Path) -> None:
    async with cluster(tiny_llama_dir, stand_in("p0"), stand_in("p1"), stand_in("d0", pause_s=0.02)) as it:
        call = it.stub.Generate(text_request())
        pieces = [await call.read()]
        victim = next(worker for worker in it.workers if worker.submits)
        await victim.stop()
        assert await rest(call, pieces) == ANSWER
        assert pieces[-1].finish.replays == 0
        assert not submits(it, 1)
        await it.idle()


async def test_the_only_decode_worker_comes_back(tiny_llama_dir: Path) -> None:
    worker = stand_in("d0", mute_after=4, fail_attempts=1)
    async with cluster(tiny_llama_dir, stand_in("p0"), worker) as it:
        calls = [it.stub.Generate(text_request(f"prompt {i}")) for i in range(20)]
        streams = [[await call.read()] for call in calls]
        await worker.stop()
        await it.ready(1)
        worker.identity = draw_identity("d0", "test-host")
        await worker.start(worker.address)
        for call, pieces in zip(calls, streams, strict=True):
            assert await rest(call, pieces) == ANSWER
        await it.idle()


async def test_nobody_comes_in_time(tiny_llama_dir: Path) -> None:
    async with cluster(tiny_llama_dir, stand_in("p0"), stand_in("d0", mute_after=4), replay_wait_s=0.3) as it:
        call = it.stub.Generate(text_request())
        pieces = [await call.read()]
        await it.worker("d0").stop()
        error = await refusal(rest(call, pieces))
        assert error.code() is Code.UNAVAILABLE
        assert "d0 is gone" in (error.details() or "")
        assert "no decode worker" in (error.details() or "")
        assert retry_s(error) > 0
        await it.idle()
        await until(lambda: it.worker("p0").cancels.total() == 1)


@pytest.mark.parametrize("how", ["cancel", "deadline"])
async def test_a_request_that_waits_for_a_worker_can_end(tiny_llama_dir: Path, how: str) -> None:
    async with cluster(tiny_llama_dir, stand_in("p0"), stand_in("d0", mute_after=4)) as it:
        call = it.stub.Generate(text_request(), timeout=1.0 if how == "deadline" else None)
        pieces = [await call.read()]
        await it.worker("d0").stop()
        await it.ready(1)
        if how == "cancel":
            call.cancel()
        else:
            assert (await refusal(rest(call, pieces))).code() is Code.DEADLINE_EXCEEDED
        await it.idle()


async def test_attempts_are_bounded(tiny_llama_dir: Path) -> None:
    """Whatever the workers: each attempt makes some tokens, and dies."""
    worker = stand_in("b0", mute_after=0, fail=INTERNAL)
    async with cluster(tiny_llama_dir, worker, max_attempts=4) as it:
        error = await refusal(it.collect(text_request()))
        assert error.code() is Code.INTERNAL
        assert "attempt 4 of 4" in (error.details() or "")
        assert [submit.attempt for submit in worker.submits] == [0, 1, 2, 3]
        await it.idle()


async def test_a_draining_worker_does_not_count(tiny_llama_dir: Path) -> None:
    workers = [stand_in(f"b{i}", mute_after=0, fail=DRAINING) for i in range(4)]
    workers[2].script = Script()
    async with cluster(tiny_llama_dir, *workers, max_attempts=1) as it:
        for worker in workers:
            if worker.name != "b2":
                worker.draining = True
        pieces = await it.collect(text_request())
        assert token_ids(pieces) == ANSWER
        assert pieces[-1].finish.decode_worker == "b2"
        await until(lambda: sum(load.draining for load in it.gateway.fleet.loads()) == 3)
        await it.idle()


async def test_all_drain(tiny_llama_dir: Path) -> None:
    worker = stand_in("b0", mute_after=0, fail=DRAINING)
    async with cluster(tiny_llama_dir, worker, replay_wait_s=0.5) as it:
        error = await refusal(it.collect(text_request()))
        assert error.code() is Code.UNAVAILABLE
        assert "draining" in (error.details() or "")
        assert len(worker.submits) < 10
        await it.idle()


async def test_a_hundred_streams_and_a_death_each_moment(tiny_llama_dir: Path) -> None:
    """2P2D; workers die and come back in turn while streams run; all answers are the fault-free one."""
    workers = [stand_in(name, pause_s=0.01) for name in ("p0", "p1", "d0", "d1")]
    async with cluster(tiny_llama_dir, *workers, max_attempts=50) as it:

        async def one(i: int) -> list[int]:
            await asyncio.sleep(i * 0.02)
            return token_ids(await it.collect(text_request(f"prompt {i}")))

        async def faults() -> None:
            for turn in range(12):
                worker = workers[turn % 4]
                await worker.stop()
                await asyncio.sleep(0.1)
                worker.identity = draw_identity(worker.name, "test-host")
                await worker.start(worker.address)
                await asyncio.sleep(0.1)

        killer = asyncio.create_task(faults())
        answers = await asyncio.gather(*(one(i) for i in range(100)), return_exceptions=True)
        await killer
        refused = [answer for answer in answers if isinstance(answer, BaseException)]
        assert all("no decode worker" in str(error) for error in refused)  # on arrival
        assert len(refused) < 50
        assert all(answer == ANSWER for answer in answers if not isinstance(answer, BaseException))
        await it.idle()


def test_reports_of_attempts_are_merged() -> None:
    first = WorkerReport(1.0, 2.0, 3.0, 40, "p0", "d0")
    later = WorkerReport(0.1, 0.2, 0.3, 4, "p1", "d1")
    assert merged(WorkerReport(), later) == later
    assert merged(first, later) == WorkerReport(1.0, 2.0, 3.0, 40, "p1", "d1")
    silent = WorkerReport(prefill_worker="p0", decode_worker="d0")
    assert merged(silent, later) == later
    assert merged(WorkerReport(1.0, 2.0, 0.0, 40, "p0", "d0"), later) == WorkerReport(1.0, 2.0, 0.3, 40, "p1", "d1")
