"""The hand-over where steps overlap and copies complete later, as on GPUs: the tokens are those of one engine alone."""

import asyncio
import random
import threading
from pathlib import Path
from typing import Any

import pytest

from twostroke.engine.request import SequenceKey, sample_keys
from twostroke.errors import HandoverExpired

from ..handover_rig import LAYERS, PAGE, expected_tokens, random_prompt, running
from ..late_device import LateHandover, LateRunner


def late(seed: int = 0) -> tuple[LateHandover, LateHandover]:
    """Both workers' devices."""
    return LateHandover(seed), LateHandover(seed + 1)


def runner_of(worker: Any) -> LateRunner:
    assert isinstance(worker.runner, LateRunner)
    return worker.runner


@pytest.mark.parametrize("length", [1, 4, 5, 61, 200])
async def test_the_tokens_are_those_of_one_engine(tmp_path: Path, length: int) -> None:
    async with running(tmp_path, late=late(length)) as rig:
        prompt = random_prompt(length, length)
        assert await rig.generate(prompt, 10) == expected_tokens(prompt, 10)
        await rig.whole()


async def test_steps_do_overlap(tmp_path: Path) -> None:
    async with running(tmp_path, late=late(), token_budget=16) as rig:
        prompts = [random_prompt(seed, 60) for seed in range(3)]
        keys = [rig.start(prompt, 9) for prompt in prompts]
        for prompt, key in zip(prompts, keys, strict=True):
            assert await rig.result(key) == expected_tokens(prompt, 9)
        assert runner_of(rig.p).most_on_the_way == runner_of(rig.d).most_on_the_way == 2
        assert rig.p.runner.tokens_run == 180
        await rig.whole()


@pytest.mark.parametrize("start_now", [True, False])
@pytest.mark.parametrize("seed", range(3))
async def test_many_at_once_in_small_pools(tmp_path: Path, seed: int, start_now: bool) -> None:
    async with running(tmp_path, late=late(seed), pages=80, token_budget=32) as rig:
        prompts = [random_prompt(100 * seed + n, 1 + 7 * (n % 9)) for n in range(30)]
        keys = [rig.start(prompt, 1 + n % 8, start_now=start_now) for n, prompt in enumerate(prompts)]
        for n, key in enumerate(keys):
            assert await rig.result(key) == expected_tokens(prompts[n], 1 + n % 8)
        await rig.whole()


async def test_a_ticket_that_comes_while_a_step_is_waited_for_is_served_there(tmp_path: Path) -> None:
    async with running(tmp_path, late=late()) as rig:
        assert await rig.generate([5], 2) == expected_tokens([5], 2)  # the link stands
        prompt = random_prompt(9, 90)
        prefill, decode = rig.requests(prompt, 5)
        runner, blocked = runner_of(rig.p), asyncio.Event()
        loop, hold = asyncio.get_running_loop(), threading.Event()
        runner.stream.put(lambda: (loop.call_soon_threadsafe(blocked.set), hold.wait()))  # the device is busy
        await blocked.wait()
        rig.p.submit(prefill, rig.d)
        rig.d.submit(decode, rig.p)
        while rig.p.handover.traffic.tickets != 2 or rig.p.handover._inbox:  # served; its step has not even begun
            await asyncio.sleep(0.002)
        assert prefill.key not in rig.p.tokens
        assert runner.mark(0)[0] >= runner._computed[0]
        hold.set()
        assert await rig.result(decode.key) == expected_tokens(prompt, 5)
        await rig.whole()


async def test_samples_part_after_a_late_hand_over(tmp_path: Path) -> None:
    async with running(tmp_path, late=late(3)) as rig:
        prompt = random_prompt(3, 2 * PAGE + 1)
        key = rig.start(prompt, 5, samples=3)
        for number, sample in enumerate(sample_keys(key, 3)):
            await rig.d.ended(sample)
            assert rig.d.tokens[sample] == expected_tokens(prompt, 5, sample=number)
        await rig.whole()


@pytest.mark.parametrize("seed", range(8))
async def test_any_mixture_of_requests_and_cancels(tmp_path: Path, seed: int) -> None:
    """On small pools: preemption on either side, cancels at any moment; nothing is wrong, lost or left."""
    noise = random.Random(seed)
    async with running(
        tmp_path, late=late(seed), pages=40, prefill_pages=40, token_budget=noise.choice([8, 24, 64]),
        unticketed_share=noise.choice([0.5, 1.0]), max_batch=6,
    ) as rig:  # fmt: skip
        prompts: dict[SequenceKey, tuple[list[int], int]] = {}
        dropped: set[SequenceKey] = set()
        for number in range(24):
            prompt, count = random_prompt(1000 * seed + number, noise.randint(1, 60)), noise.randint(1, 12)
            if noise.random() < 0.3 and prompts:
                prompt = next(iter(prompts.values()))[0] + prompt[:5]  # a common beginning
            key = rig.start(prompt, count, start_now=noise.random() < 0.7)
            prompts[key] = prompt, count
            if noise.random() < 0.25:
                await asyncio.sleep(noise.random() * 0.03)
                victim = noise.choice(list(prompts))
                dropped.add(victim)
                for worker in (rig.p, rig.d):
                    worker.driver.drop([victim])
            if noise.random() < 0.4:
                await asyncio.sleep(noise.random() * 0.02)
        for key, (prompt, count) in prompts.items():
            if key not in dropped:
                assert await rig.result(key) == expected_tokens(prompt, count)
        await rig.whole()


async def test_a_link_that_breaks_under_late_copies(tmp_path: Path) -> None:
    async with running(tmp_path, late=late(5), token_budget=8) as rig:
        prompts = [random_prompt(seed, 40) for seed in range(6)]
        keys = [rig.start(prompt, 6) for prompt in prompts]
        for _ in range(5):
            await asyncio.sleep(0.02)
            rig.p.links.drop(rig.d.identity.incarnation)
        for prompt, key in zip(prompts, keys, strict=True):
            assert await rig.result(key) == expected_tokens(prompt, 6)
        await rig.whole()


async def test_a_step_that_cannot_be_launched_fails_its_sequences_only(tmp_path: Path) -> None:
    async with running(tmp_path, late=late(6)) as rig:
        assert await rig.generate([1, 2, 3], 3) == expected_tokens([1, 2, 3], 3)
        rig.p.runner.fail_with = RuntimeError("no")
        key = rig.start(random_prompt(6, 30), 4)
        await rig.p.ended(key)
        with pytest.raises(HandoverExpired):
            await rig.result(key)
        assert await rig.generate([4, 5, 6], 3) == expected_tokens([4, 5, 6], 3)
        await rig.whole()


async def test_source_pages_are_kept_until_a_cancelled_sequences_copies_ended(tmp_path: Path) -> None:
    async with running(tmp_path, late=late(7)) as rig:
        assert await rig.generate([5], 2) == expected_tokens([5], 2)
        prompt, runner = random_prompt(7, 100), runner_of(rig.p)
        prefill, decode = rig.requests(prompt, 5)
        hold = threading.Event()
        rig.d.submit(decode, rig.p)
        runner.stream.put(hold.wait)
        rig.p.submit(prefill, rig.d)
        while len(rig.p.handover._reads) < LAYERS:
            await asyncio.sleep(0.002)
        rig.p.driver.drop([prefill.key])
        rig.d.driver.drop([prefill.key])
        await asyncio.sleep(0.02)
        hold.set()
        await rig.whole()
        assert rig.p.core.state_of(prefill.key) is None


async def test_what_decode_awaits_joins_while_others_decode(tmp_path: Path) -> None:
    async with running(tmp_path, late=late(8)) as rig:
        first = rig.start(random_prompt(1, 8), 60)
        await rig.d.until(lambda: len(rig.d.tokens.get(first, [])) > 5)
        prompt = random_prompt(2, 50)
        assert await rig.generate(prompt, 6) == expected_tokens(prompt, 6)
        assert await rig.result(first) == expected_tokens(random_prompt(1, 8), 60)
        await rig.whole()
