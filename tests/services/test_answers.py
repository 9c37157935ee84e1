"""`n` answers through a real gateway, with stand-in workers: one submission, and an end for each answer."""

import asyncio
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from twostroke.services.gateway.lifecycle import together
from twostroke.v1 import inference_pb2 as pb
from twostroke.v1 import worker_pb2 as wpb

from .cluster import Cluster, cluster, cut_short, field_of, refusal, text_request, token_ids, until
from .stand_in_worker import EOS, SAMPLE_STEP, Script, StandIn

Code = grpc.StatusCode
ANSWERS = [[*range(10 + SAMPLE_STEP * sample, 40 + SAMPLE_STEP * sample), EOS] for sample in range(4)]


def stand_in(name: str, **script: Any) -> StandIn:
    role = {"p": "prefill", "d": "decode", "b": "both"}[name[0]]
    return StandIn(role, name, Script(**script))


def split(pieces: list[pb.GenerateResponse], n: int) -> list[list[pb.GenerateResponse]]:
    return [[piece for piece in pieces if piece.sample == sample] for sample in range(n)]


async def collect(it: Cluster, n: int, **fields: Any) -> list[list[pb.GenerateResponse]]:
    return split(await it.collect(text_request(n=n, **fields)), n)


async def test_each_worker_is_asked_once_and_each_answer_ends_once(tiny_llama_dir: Path) -> None:
    async with cluster(tiny_llama_dir, stand_in("p0", twice=True), stand_in("d0", per_step=3)) as it:
        told = await collect(it, 4, logprobs=1)
        assert [token_ids(pieces) for pieces in told] == ANSWERS
        for pieces in told:
            assert sum(len(piece.logprobs) for piece in pieces) == 31
            usage = pieces[-1].finish.usage
            assert (usage.prompt_tokens, usage.cached_tokens, usage.output_tokens) == (5, 5, 31)
            assert (pieces[-1].finish.prefill_worker, pieces[-1].finish.decode_worker) == ("p0", "d0")
        assert len({pieces[-1].finish.seed for pieces in told}) == 1
        for name, work in (("p0", wpb.WORK_PREFILL), ("d0", wpb.WORK_DECODE)):
            (submit,) = it.worker(name).submits
            assert (submit.work, submit.sample, submit.samples) == (work, 0, 4)
            assert not it.worker(name).cancels
        await it.idle()
        for load in it.gateway.fleet.loads():
            assert (load.sequences, load.waiting_tokens) == (0, 0)


@pytest.mark.parametrize(("n", "asked"), [(0, 0), (1, 0)])
async def test_one_answer_is_the_plain_case(tiny_llama_dir: Path, n: int, asked: int) -> None:
    async with cluster(tiny_llama_dir, stand_in("b0")) as it:
        assert token_ids(await it.collect(text_request(n=n))) == ANSWERS[0]
        assert it.worker("b0").submits[0].samples == asked
        await it.idle()


async def test_what_is_out_of_range_or_too_wide_is_refused(tiny_llama_dir: Path) -> None:
    workers = [stand_in("p0"), stand_in("d0"), stand_in("d1")]
    workers[1].max_batch, workers[2].max_batch = 2, 4
    async with cluster(tiny_llama_dir, *workers) as it:
        for n in (5, 17, 1 << 31):
            error = await refusal(it.collect(text_request(n=n)))
            assert (error.code(), field_of(error)) == (Code.INVALID_ARGUMENT, "n")
        assert [token_ids(pieces) for pieces in await collect(it, 4)] == ANSWERS
        assert not workers[1].submits
        await it.idle()


async def test_a_stop_string_ends_one_answer_at_both_workers(tiny_llama_dir: Path) -> None:
    async with cluster(tiny_llama_dir, stand_in("p0"), stand_in("d0", mute_after=25)) as it:
        text = it.gateway.lifecycle.model.detokenizer()
        word = "".join(text.push(token) for token in ANSWERS[1][:20])[-6:]
        request = text_request(n=3)
        request.stopping.strings.append(word)
        call = it.stub.Generate(request)
        pieces: list[pb.GenerateResponse] = []
        while sum(len(piece.token_ids) for piece in pieces if piece.sample != 1) < 50:
            pieces.append(await call.read())
        stopped = split(pieces, 3)[1]
        assert stopped[-1].finish.stop_string == word
        number = it.worker("d0").submits[-1].request
        await until(lambda: it.worker("p0").cancels[number] == it.worker("d0").cancels[number] == 1)
        await until(lambda: sorted(key[1] for key in it.worker("d0").live) == [0, 2])
        assert it.gateway.admission.inside == 3
        call.cancel()
        await it.idle()


@pytest.mark.parametrize("how", ["cancel", "deadline"])
@pytest.mark.parametrize("tokens", [0, 1, 12])
async def test_the_client_s_end_is_the_end_of_all_answers(tiny_llama_dir: Path, how: str, tokens: int) -> None:
    async with cluster(tiny_llama_dir, stand_in("p0", mute_after=tokens), stand_in("d0", mute_after=tokens)) as it:

        def start(seconds: float | None = None) -> Any:
            return it.stub.Generate(text_request(n=3), timeout=seconds)

        if how == "deadline":
            error = await cut_short(it, start, 3 * tokens, lambda: it.worker("d0").submits)
            assert error.code() is Code.DEADLINE_EXCEEDED
        else:
            call, seen = start(), 0
            while seen < 3 * tokens:
                seen += len((await call.read()).token_ids)
            await until(lambda: it.worker("d0").live)
            call.cancel()
        await it.idle()


async def test_a_failure_of_one_answer_ends_the_call(tiny_llama_dir: Path) -> None:
    fail = (wpb.FAILURE_CODE_INTERNAL, "oops")
    async with cluster(tiny_llama_dir, stand_in("p0"), stand_in("d0", mute_after=5, fail=fail), max_attempts=1) as it:
        error = await refusal(it.collect(text_request(n=4)))
        assert error.code() is Code.INTERNAL
        assert "oops" in (error.details() or "")
        await it.idle()


@pytest.mark.parametrize("tokens", [0, 7])
async def test_each_answer_is_replayed_by_itself(tiny_llama_dir: Path, tokens: int) -> None:
    workers = [stand_in("p0"), stand_in("d0", mute_after=tokens, fail_attempts=1)]
    async with cluster(tiny_llama_dir, *workers, stand_in("d1", mute_after=tokens, fail_attempts=1)) as it:
        call = it.stub.Generate(text_request(n=3))
        pieces: list[pb.GenerateResponse] = []
        while sum(len(piece.token_ids) for piece in pieces) < 3 * max(1, tokens):
            pieces.append(await call.read())
        victim = next(worker for worker in it.workers if worker.name != "p0" and worker.submits)
        await victim.stop()
        while (piece := await call.read()) is not grpc.aio.EOF:
            pieces.append(piece)
        assert [token_ids(answer) for answer in split(pieces, 3)] == ANSWERS[:3]
        again = [submit for submit in it.worker("p0").submits if submit.attempt == 1]
        assert [(submit.sample, submit.samples) for submit in again] == [(0, 0), (1, 0), (2, 0)]
        for submit in again:
            assert list(submit.output_ids) == ANSWERS[submit.sample][: submit.first_index]
        await it.idle()


async def test_a_slow_reader_of_several_answers_is_cut_off(tiny_llama_dir: Path) -> None:
    tokens = [10 + i % 100 for i in range(2000)]
    worker = StandIn("both", "b0", Script(tokens=tokens, per_step=4))
    async with cluster(tiny_llama_dir, worker, slow_reader_s=0.3) as it:
        silent = it.stub.Generate(text_request("silent", n=3, logprobs=20))
        await silent.read()
        await it.idle()

        async def drained() -> None:
            while await silent.read() is not grpc.aio.EOF:
                pass

        assert (await refusal(drained())).code() is Code.RESOURCE_EXHAUSTED


async def test_every_answer_takes_a_place_in_the_queue(tiny_llama_dir: Path) -> None:
    async with cluster(tiny_llama_dir, stand_in("p0"), stand_in("d0", mute_after=3), max_queue=4) as it:
        call = it.stub.Generate(text_request(n=3))
        await call.read()
        assert it.gateway.admission.inside == 3
        assert (await refusal(it.collect(text_request(n=2)))).code() is Code.RESOURCE_EXHAUSTED
        call.cancel()
        await it.idle()
        wide = it.stub.Generate(text_request(n=9))  # more than there are: all of them
        await wide.read()
        assert it.gateway.admission.inside == 4
        wide.cancel()
        await it.idle()


async def test_together_ends_all_with_the_first_failure() -> None:
    ended: list[int] = []

    async def waits(number: int) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(number)

    async def fails() -> None:
        await asyncio.sleep(0)
        raise ValueError("this one")

    async def is_cancelled() -> None:
        raise asyncio.CancelledError

    with pytest.raises(ValueError, match="this one"):
        await together([waits(0), fails(), waits(2)])
    assert sorted(ended) == [0, 2]
    with pytest.raises(asyncio.CancelledError):
        await together([asyncio.sleep(0), is_cancelled()])
    task = asyncio.ensure_future(together([waits(3), waits(4)]))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert sorted(ended) == [0, 2, 3, 4]
