"""Several samples of one prompt through real prefill and decode workers: one prefill, one transfer, n answers."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from twostroke.engine.request import FinishReason, SequenceKey, sample_keys
from twostroke.errors import DeadlineExceeded, HandoverExpired, InvalidRequest

from .handover_rig import PAGE, Rig, expected_tokens, random_prompt, running

LENGTHS = [1, PAGE - 1, PAGE, PAGE + 1, 5 * PAGE, 5 * PAGE + 2]


async def answers(rig: Rig, key: SequenceKey, samples: int) -> list[list[int]]:
    return [await rig.result(each) for each in sample_keys(key, samples)]


@pytest.mark.parametrize("length", LENGTHS)
async def test_one_prefill_one_transfer_and_n_answers(tmp_path: Path, length: int) -> None:
    prompt = random_prompt(length, length)
    async with running(tmp_path) as rig:
        key = rig.start(prompt, 9, samples=4)
        told = await answers(rig, key, 4)
        assert told == [expected_tokens(prompt, 9, sample=sample) for sample in range(4)]
        assert len({tuple(answer) for answer in told}) == 4
        await rig.whole()
        assert rig.p.runner.tokens_run == rig.p.core.load().prefilled_tokens == length
        assert rig.d.core.load().prefilled_tokens == 0
        assert (rig.d.handover.traffic.tickets, rig.p.handover.traffic.tickets) == (1, 1)
        assert rig.p.handover.traffic.pages == -(-length // PAGE)
        assert {rig.d.finishes[each] for each in sample_keys(key, 4)} == {FinishReason.LENGTH}


async def test_each_sample_equals_a_request_for_that_sample_alone(tmp_path: Path) -> None:
    prompt = random_prompt(5, 11)
    async with running(tmp_path) as rig:
        together = await answers(rig, rig.start(prompt, 6, samples=3), 3)
        for sample, answer in enumerate(together):
            prefill, decode = rig.requests(prompt, 6)
            for request in (prefill, decode):
                request.key = request.key._replace(sample=sample)
            rig.p.submit(prefill, rig.d)
            rig.d.submit(decode, rig.p)
            assert await rig.result(prefill.key) == answer
        await rig.whole()


async def test_samples_may_begin_anywhere(tmp_path: Path) -> None:
    prompt = random_prompt(6, 10)
    async with running(tmp_path) as rig:
        prefill, decode = rig.requests(prompt, 4, samples=2)
        for request in (prefill, decode):
            request.key = request.key._replace(sample=5)
        rig.p.submit(prefill, rig.d)
        rig.d.submit(decode, rig.p)
        assert await answers(rig, prefill.key, 2) == [expected_tokens(prompt, 4, sample=sample) for sample in (5, 6)]
        await rig.whole()


@pytest.mark.parametrize("ended", [[0], [1], [1, 2], [0, 2], [0, 1, 2]])
async def test_samples_that_end_with_token_0(tmp_path: Path, ended: list[int]) -> None:
    prompt = random_prompt(7, 10)
    stop = tuple(expected_tokens(prompt, 1, sample=sample)[0] for sample in ended)
    async with running(tmp_path) as rig:
        key = rig.start(prompt, 5, samples=3, stop_token_ids=stop)
        told = await answers(rig, key, 3)
        assert told == [expected_tokens(prompt, 5, frozenset(stop), sample) for sample in range(3)]
        assert [rig.d.finishes[each] is FinishReason.STOP for each in sample_keys(key, 3)] == [
            sample in ended for sample in range(3)
        ]
        await rig.whole()


@pytest.mark.parametrize("cancelled", [[0], [2], [0, 1], [0, 1, 2]])
@pytest.mark.parametrize("when", ["at once", "in transit", "decoding"])
async def test_cancels_of_single_samples(tmp_path: Path, cancelled: list[int], when: str) -> None:
    """At both workers, at any moment: the others go on, and what was for the cancelled ones alone is free."""
    prompt = random_prompt(8, 10)
    async with running(tmp_path) as rig:
        prefill, decode = rig.requests(prompt, 40, samples=3)
        keys = sample_keys(prefill.key, 3)
        dropped = [keys[sample] for sample in cancelled]
        rig.d.submit(decode, rig.p)
        if when == "in transit":
            await rig.d.settled(lambda: rig.d.handover.traffic.tickets == 1)
        if when != "decoding":
            rig.d.driver.drop(dropped)
        rig.p.submit(prefill, rig.d)
        if when == "decoding":
            await rig.d.until(lambda: all(len(rig.d.tokens.get(key, ())) > 2 for key in dropped))
            rig.d.driver.drop(dropped)
        if len(cancelled) < 3:
            rig.p.driver.drop(dropped)
        for sample, key in enumerate(keys):
            if sample not in cancelled:
                assert await rig.result(key) == expected_tokens(prompt, 40, sample=sample)
            elif when != "decoding":
                assert key not in rig.d.tokens
        rig.p.driver.drop(keys)
        await rig.whole()
        assert not rig.d.failures


async def test_a_prefill_worker_computes_on_until_no_sample_is_wanted(tmp_path: Path) -> None:
    async with running(tmp_path) as rig:
        prefill, _ = rig.requests(random_prompt(9, 9), 4, samples=3)
        rig.p.submit(prefill, rig.d)
        keys = sample_keys(prefill.key, 3)
        await rig.p.until(lambda: all(key in rig.p.tokens for key in keys))
        rig.p.driver.drop(keys[:2])
        assert await rig.p.driver.call(lambda: rig.p.core.state_of(keys[2])) is not None
        assert await rig.p.driver.call(lambda: rig.p.core.state_of(keys[0])) is not None  # it carries the other one
        rig.p.driver.drop(keys[2:])
        await rig.whole()


@pytest.mark.parametrize("pages", [9, 12, 20])
async def test_small_pools_preempt_and_recompute(tmp_path: Path, pages: int) -> None:
    async with running(tmp_path, pages=pages, prefill_pages=65, max_batch=6) as rig:
        prompts = [random_prompt(20 + number, 3 + 2 * number) for number in range(4)]
        keys = [rig.start(prompt, 12, samples=2) for prompt in prompts]
        for prompt, key in zip(prompts, keys, strict=True):
            assert await answers(rig, key, 2) == [expected_tokens(prompt, 12, sample=sample) for sample in range(2)]
        await rig.whole()


async def test_cold_twins_with_samples_share_one_prefill_and_one_transfer_of_their_prefix(tmp_path: Path) -> None:
    prefix = random_prompt(31, 6 * PAGE)
    async with running(tmp_path, pages=129) as rig:
        prompts = [[*prefix, number, number] for number in range(4)]
        keys = [rig.start(prompt, 4, samples=3) for prompt in prompts]
        for prompt, key in zip(prompts, keys, strict=True):
            assert await answers(rig, key, 3) == [expected_tokens(prompt, 4, sample=sample) for sample in range(3)]
        await rig.whole()
        assert rig.p.runner.tokens_run == len(prefix) + 2 * 4
        assert rig.p.handover.traffic.pages == 6 + 4


async def test_the_writers_death_fails_every_sample(tmp_path: Path) -> None:
    async with running(tmp_path) as rig:
        _, decode = rig.requests(random_prompt(10, 9), 4, samples=3)
        rig.d.submit(decode, rig.p)
        await rig.d.settled(lambda: rig.d.handover.traffic.tickets == 1)
        keys = sample_keys(decode.key, 3)
        rig.d.driver.drop(keys[:1])
        await rig.d.driver.call(lambda: None)  # it is dropped: what links tell may overtake a request
        rig.d.handover.writer_dead(rig.p.identity.incarnation)
        await rig.d.until(lambda: len(rig.d.failures) == 2)
        assert [type(rig.d.failures[key]) for key in keys[1:]] == [HandoverExpired, HandoverExpired]
        await rig.d.all_whole()


@pytest.mark.parametrize("side", ["p", "d"])
async def test_refusals_and_deadlines_reach_every_sample(tmp_path: Path, side: str) -> None:
    async with running(tmp_path) as rig:
        worker: Any = getattr(rig, side)
        requests = rig.requests([1, 2, 3], 4, samples=17)
        worker.submit(requests[side == "d"], rig.d if side == "p" else rig.p)
        await worker.until(lambda: len(worker.failures) == 17)
        requests = rig.requests([1, 2, 3], 4, samples=2)
        worker.submit(requests[side == "d"], None)  # names no peer
        await worker.until(lambda: len(worker.failures) == 19)
        assert {type(error) for error in worker.failures.values()} == {InvalidRequest}
        requests = rig.requests([1, 2, 3], 4, samples=3, start_now=False)
        request = requests[side == "d"]
        request.deadline = asyncio.get_running_loop().time() + 0.1
        worker.submit(request, rig.d if side == "p" else rig.p)
        await worker.until(lambda: len(worker.failures) == 22)
        assert [type(worker.failures[key]) for key in sample_keys(request.key, 3)] == [DeadlineExceeded] * 3
        await worker.all_whole()
