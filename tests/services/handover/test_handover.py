"""The hand-over from end to end: prefill here, decode there, and the tokens are those of one engine alone."""

import asyncio
import random
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from twostroke.engine.batch import Row
from twostroke.engine.request import FinishReason, Request, SamplingParams, SequenceKey, Work, sample_keys
from twostroke.engine.sequence import State
from twostroke.errors import HandoverExpired, InvalidRequest, TwostrokeError
from twostroke.kvtransfer.messages import Copy
from twostroke.kvtransfer.peer_pools import Landed
from twostroke.kvtransfer.transport import Done, ShmTransport
from twostroke.services.handover.handover import NoHandover

from ..handover_rig import GATEWAY, LAYERS, PAGE, Rig, expected_tokens, random_prompt, running


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 61, 200])
async def test_the_tokens_are_those_of_one_engine(tmp_path: Path, length: int) -> None:
    async with running(tmp_path) as rig:
        prompt = random_prompt(length, length)
        assert await rig.generate(prompt, 10) == expected_tokens(prompt, 10)
        await rig.whole()


async def test_a_prompt_in_chunks_is_pushed_as_it_grows(tmp_path: Path) -> None:
    async with running(tmp_path, token_budget=16) as rig:
        prompt = random_prompt(1, 101)
        assert await rig.generate(prompt, 5) == expected_tokens(prompt, 5)
        assert rig.d.runner.tokens_run == 4  # no prompt token was computed on the decode side
        await rig.whole()


@pytest.mark.parametrize("start_now", [True, False])
async def test_many_at_once(tmp_path: Path, start_now: bool) -> None:
    async with running(tmp_path, pages=80, token_budget=32) as rig:
        prompts = [random_prompt(seed, 1 + 7 * (seed % 9)) for seed in range(40)]
        keys = [rig.start(prompt, 1 + seed % 8, start_now=start_now) for seed, prompt in enumerate(prompts)]
        for seed, key in enumerate(keys):
            assert await rig.result(key) == expected_tokens(prompts[seed], 1 + seed % 8)
        await rig.whole()


@pytest.mark.parametrize("length", [40, 42])
async def test_what_decode_has_cached_is_not_sent_again(tmp_path: Path, length: int) -> None:
    async with running(tmp_path) as rig:
        prompt = random_prompt(2, length)
        copied = count_copies(rig)
        assert await rig.generate(prompt, 6) == expected_tokens(prompt, 6)
        first = copied[0]
        assert first == LAYERS * -(-length // PAGE)
        assert await rig.generate(prompt, 6) == expected_tokens(prompt, 6)
        assert copied[0] - first == (0 if length % PAGE == 0 else LAYERS)  # a ticket without pages, or with the last
        await rig.whole()


async def test_cold_twins_cost_one_prefill_and_one_transfer(tmp_path: Path) -> None:
    async with running(tmp_path) as rig:
        prompt = random_prompt(3, 80)
        copied = count_copies(rig)
        keys = [rig.start([*prompt, seed], 4) for seed in range(8)]
        for seed, key in enumerate(keys):
            assert await rig.result(key) == expected_tokens([*prompt, seed], 4)
        assert rig.p.runner.tokens_run == 80 + 8
        assert copied[0] == LAYERS * (80 // PAGE + 8)
        await rig.whole()


async def test_a_late_ticket(tmp_path: Path) -> None:
    """Prefill was done long before decode had room."""
    async with running(tmp_path) as rig:
        prompt = random_prompt(4, 50)
        prefill, decode = rig.requests(prompt, 5)
        rig.p.submit(prefill, rig.d)
        await rig.p.until(lambda: prefill.key in rig.p.tokens)
        assert await rig.p.driver.call(lambda: rig.p.core.state_of(prefill.key)) is State.HELD
        rig.d.submit(decode, rig.p)
        assert await rig.result(decode.key) == expected_tokens(prompt, 5)
        await rig.whole()


async def test_a_ticket_before_its_request(tmp_path: Path) -> None:
    async with running(tmp_path) as rig:
        prompt = random_prompt(5, 50)
        prefill, decode = rig.requests(prompt, 5)
        rig.d.submit(decode, rig.p)
        await rig.p.settled(lambda: rig.p.handover.writer.open_tickets() == 1)
        rig.p.submit(prefill, rig.d)
        assert await rig.result(decode.key) == expected_tokens(prompt, 5)
        await rig.whole()


async def test_a_ticket_within_a_step_is_served_in_that_step(tmp_path: Path) -> None:
    async with running(tmp_path) as rig:
        await rig.generate([1], 2)  # the link stands
        await rig.whole()
        prompt = random_prompt(6, 50)
        prefill, decode = rig.requests(prompt, 5)
        entered, go = threading.Event(), threading.Event()

        def gate(layer: int, rows: list[Row]) -> None:
            if layer == 1 and rows[0].key == prefill.key:
                entered.set()
                assert go.wait(10)

        rig.p.runner.after_layer = gate
        copied = count_copies(rig)
        in_step: list[int] = []
        rig.p.submit(prefill, rig.d)
        await asyncio.to_thread(entered.wait, 10)
        rig.d.submit(decode, rig.p)
        await rig.p.told()
        stepped = rig.p.handover.stepped

        def note(result: Any) -> Any:
            in_step.append(copied[0])
            return stepped(result)

        rig.p.handover.stepped = note  # type: ignore[method-assign]
        go.set()
        assert await rig.result(decode.key) == expected_tokens(prompt, 5)
        assert in_step[0] == LAYERS * -(-50 // PAGE)  # layer 0, which was done before, and the others
        await rig.whole()


async def test_a_ticket_within_a_step_that_takes_the_pages_away(tmp_path: Path) -> None:
    """The engine preempts an unticketed sequence; before anyone learns of it, its ticket comes."""
    async with running(tmp_path, prefill_pages=25, pages=65, unticketed_share=1.0) as rig:
        await rig.generate([1], 2)
        await rig.whole()
        first, second = random_prompt(7, 60), random_prompt(8, 60)
        prefill, decode = rig.requests(first, 5)
        rig.p.submit(prefill, rig.d)
        await rig.p.until(lambda: prefill.key in rig.p.tokens)  # it holds 15 of 24 pages

        entered, go = threading.Event(), threading.Event()
        other, other_decode = rig.requests(second, 5, start_now=False)

        def gate(layer: int, rows: list[Row]) -> None:
            if layer == 0 and any(row.key == other.key for row in rows) and not entered.is_set():
                entered.set()
                assert go.wait(10)

        rig.p.runner.after_layer = gate
        rig.p.submit(other, rig.d)
        rig.d.submit(other_decode, rig.p)
        await asyncio.to_thread(entered.wait, 10)
        rig.d.submit(decode, rig.p)
        await rig.p.told()
        go.set()
        assert await rig.result(other.key) == expected_tokens(second, 5)
        assert await rig.result(decode.key) == expected_tokens(first, 5)
        assert rig.p.tokens[prefill.key] == expected_tokens(first, 1)  # sampled once, computed twice
        await rig.whole()


async def test_token_0_may_be_the_last(tmp_path: Path) -> None:
    async with running(tmp_path) as rig:
        prompt = random_prompt(9, 48)
        (token,) = expected_tokens(prompt, 1)
        key = rig.start(prompt, 20, stop_token_ids=(token,))
        assert await rig.result(key) == [token]
        assert rig.p.finishes[key] is rig.d.finishes[key] is FinishReason.STOP
        await rig.whole()
        assert await rig.generate(prompt, 5) == expected_tokens(prompt, 5)  # nothing unchecked was cached
        await rig.whole()


async def test_a_replay_goes_on_where_it_was(tmp_path: Path) -> None:
    async with running(tmp_path) as rig:
        prompt = random_prompt(10, 30)
        wanted = expected_tokens(prompt, 12)
        key = rig.start(prompt, 12, output_ids=wanted[:7])
        assert await rig.result(key) == wanted[7:]
        assert rig.p.first_index[key] == rig.d.first_index[key] == 7
        await rig.whole()


async def test_logprobs_come_with_either_copy_of_token_0(tmp_path: Path) -> None:
    async with running(tmp_path) as rig:
        key = rig.start(random_prompt(11, 30), 3, logprobs=1)
        await rig.result(key)
        assert rig.p.logprobs[key] == rig.d.logprobs[key][:1]
        assert len(rig.d.logprobs[key][0]) == 2
        await rig.whole()


@pytest.mark.parametrize("stops", [False, True])
@pytest.mark.parametrize("samples", [1, 3])
async def test_either_copy_of_token_0_tells_what_prefill_measured(tmp_path: Path, samples: int, stops: bool) -> None:
    """Also where token 0 is the last one, and no page is looked at."""
    async with running(tmp_path) as rig:
        prompt = random_prompt(20, 40)
        await rig.generate([*prompt[:12], 1], 2)
        stop_ids = [token for sample in range(samples) for token in expected_tokens(prompt, 1, sample=sample)]
        key = rig.start(prompt, 3, samples=samples, stop_token_ids=tuple(stop_ids) if stops else ())
        for sample in sample_keys(key, samples):
            await rig.result(sample)
            await rig.p.until(lambda sample=sample: sample in rig.p.tokens)  # type: ignore[misc]
            (first, *_), told = rig.p.timings[sample], rig.d.timings[sample]
            assert (first.cached_tokens, first.transfer) == (12, 0)
            assert first.prefill > 0
            for timings in told:
                assert timings.cached_tokens == first.cached_tokens
                assert (timings.queue, timings.prefill) == pytest.approx((first.queue, first.prefill), abs=1e-6)
                assert (timings.transfer > 0) == (not stops)
            assert len(told) == (1 if stops else 2)  # with the first and the last token
        assert len({rig.p.timings[sample][0].prefill for sample in sample_keys(key, samples)}) == 1
        await rig.whole()


async def test_more_than_the_decode_pool_holds(tmp_path: Path) -> None:
    """Reservations wait for pages, tickets come late, decoding sequences are preempted and recomputed."""
    async with running(tmp_path, pages=30, prefill_pages=40, max_batch=8) as rig:
        prompts = [random_prompt(100 + seed, 30) for seed in range(12)]
        keys = [rig.start(prompt, 20) for prompt in prompts]
        for prompt, key in zip(prompts, keys, strict=True):
            assert await rig.result(key) == expected_tokens(prompt, 20)
        await rig.whole()


def count_copies(rig: Rig) -> list[int]:
    """[pages copied so far]."""
    copied = [0]
    original = rig.p.handover._pools.push

    def counting(copies: Sequence[Copy], landed: Landed) -> None:
        copied[0] += sum(len(copy.src) for copy in copies)
        original(copies, landed)

    rig.p.handover._pools.push = counting  # type: ignore[method-assign]
    return copied


class Corruption:
    """Flips a byte in the decode pool after each of the next `times` copies."""

    def __init__(self, rig: Rig, monkeypatch: pytest.MonkeyPatch, times: int) -> None:
        self.left = times
        original = ShmTransport.start

        def start(transport: ShmTransport, copy: Copy, done: Done) -> None:
            def corrupt(number: int, digests: bytes) -> None:
                if self.left and copy.dst:
                    self.left -= 1
                    rig.d.pool[copy.layer, copy.dst[-1], 0, 0, PAGE - 1, 1] ^= 1
                done(number, digests)

            original(transport, copy, corrupt)

        monkeypatch.setattr(ShmTransport, "start", start)


@pytest.mark.parametrize("times", [1, 2, LAYERS])
async def test_a_corrupted_page_is_sent_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    async with running(tmp_path) as rig:
        corruption = Corruption(rig, monkeypatch, times)
        copied = count_copies(rig)
        prompt = random_prompt(12, 40)
        assert await rig.generate(prompt, 5) == expected_tokens(prompt, 5)
        assert corruption.left == 0
        assert copied[0] > LAYERS * 10
        await rig.whole()


async def test_pages_that_never_arrive_whole_are_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(tmp_path) as rig:
        Corruption(rig, monkeypatch, 10**9)
        with pytest.raises(HandoverExpired):
            await rig.generate(random_prompt(13, 40), 5)
        await rig.whole()


async def test_a_failed_copy_is_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original, failed = ShmTransport.start, [False]

    def start(transport: ShmTransport, copy: Copy, done: Done) -> None:
        if not failed[0]:
            failed[0] = True
            raise OSError("no")
        original(transport, copy, done)

    monkeypatch.setattr(ShmTransport, "start", start)
    async with running(tmp_path) as rig:
        prompt = random_prompt(14, 40)
        assert await rig.generate(prompt, 5) == expected_tokens(prompt, 5)
        assert failed[0]
        await rig.whole()


async def test_a_prefill_step_that_fails(tmp_path: Path) -> None:
    async with running(tmp_path) as rig:
        rig.p.runner.fail_with = RuntimeError("out of luck")
        key = rig.start(random_prompt(15, 40), 5)
        with pytest.raises(HandoverExpired):
            await rig.result(key)
        assert isinstance(rig.p.failures[key], RuntimeError)
        await rig.whole()
        assert await rig.generate([5], 3) == expected_tokens([5], 3)


async def test_an_expired_ticket(tmp_path: Path) -> None:
    """The prefill half never comes."""
    async with running(tmp_path, ticket_valid_s=0.3) as rig:
        _, decode = rig.requests(random_prompt(16, 40), 5)
        rig.d.submit(decode, rig.p)
        with pytest.raises(HandoverExpired):
            await rig.result(decode.key)
        await rig.whole()


async def test_halves_without_a_peer_are_refused(tmp_path: Path) -> None:
    async with running(tmp_path) as rig:
        prefill, decode = rig.requests([1, 2, 3], 5)
        rig.p.submit(prefill, None)
        rig.d.submit(decode, None)
        await rig.p.ended(prefill.key)
        await rig.d.ended(decode.key)
        assert isinstance(rig.p.failures[prefill.key], InvalidRequest)
        assert isinstance(rig.d.failures[decode.key], InvalidRequest)
        await rig.whole()


async def test_either_worker_serves_whole_requests_too(tmp_path: Path) -> None:
    async with running(tmp_path) as rig:
        prompt = random_prompt(17, 40)
        for number, worker in enumerate((rig.p, rig.d)):
            key = SequenceKey(GATEWAY, 1000 + number, 0, 0)
            worker.submit(Request(key, prompt, SamplingParams(max_tokens=5), Work.ALL), None)
            await worker.ended(key)
            assert worker.tokens[key] == expected_tokens(prompt, 5)
        await rig.whole()


PHASES = ("at once", "in the first layer", "in the last layer", "after token 0", "while decoding")


@pytest.mark.parametrize("side", ["p", "d", "both"])
@pytest.mark.parametrize("phase", PHASES)
async def test_cancel_in_every_phase(tmp_path: Path, side: str, phase: str) -> None:
    async with running(tmp_path, token_budget=32) as rig:
        await rig.generate([1], 2)
        prompt = random_prompt(18, 60)
        prefill, decode = rig.requests(prompt, 100)
        done = asyncio.Event()
        loop = asyncio.get_running_loop()

        def drop() -> None:
            for worker in {"p": [rig.p], "d": [rig.d], "both": [rig.p, rig.d]}[side]:
                worker.driver.drop([prefill.key])
            loop.call_soon_threadsafe(done.set)

        def in_layer(wanted: int) -> Any:
            return lambda layer, rows: drop() if layer == wanted and not done.is_set() else None

        if phase.startswith("in the"):
            rig.p.runner.after_layer = in_layer(0 if "first" in phase else LAYERS - 1)
        rig.p.submit(prefill, rig.d)
        rig.d.submit(decode, rig.p)
        if phase == "at once":
            drop()
        elif phase == "after token 0":
            await rig.p.until(lambda: prefill.key in rig.p.tokens)
            drop()
        elif phase == "while decoding":
            await rig.d.until(lambda: len(rig.d.tokens.get(decode.key, ())) >= 3)
            drop()
        await done.wait()
        if side == "p" and phase != "while decoding":  # its gateway would have cancelled the other half
            rig.d.driver.drop([decode.key])
        if side == "d":
            rig.p.driver.drop([prefill.key])
        if side == "p" and phase == "while decoding":
            assert await rig.result(decode.key) == expected_tokens(prompt, 100)
        await rig.whole()
        assert await rig.generate(prompt, 5) == expected_tokens(prompt, 5)


@pytest.mark.parametrize("ticketed", [True, False])
async def test_a_cancelled_prefill_loses_the_decode_half(tmp_path: Path, ticketed: bool) -> None:
    """Its ticket came before, or comes when the sequence is gone."""
    async with running(tmp_path, token_budget=16, unticketed_share=1.0) as rig:
        prefill, decode = rig.requests(random_prompt(19, 200), 5, start_now=not ticketed)
        rig.p.runner.after_layer = lambda layer, rows: rig.p.driver.drop([prefill.key])
        rig.p.submit(prefill, rig.d)
        if not ticketed:
            await rig.p.settled(lambda: rig.p.core.state_of(prefill.key) is None)
        rig.d.submit(decode, rig.p)
        with pytest.raises(HandoverExpired, match="the request is gone"):
            await rig.result(decode.key)
        assert rig.p.runner.tokens_run == 16  # it was cancelled in its first step
        await rig.whole()


async def test_broken_links_lose_nothing(tmp_path: Path) -> None:
    async with running(tmp_path, token_budget=16) as rig:
        chance = random.Random(5)
        prompts = [random_prompt(200 + seed, chance.randrange(1, 90)) for seed in range(30)]
        keys = [rig.start(prompt, 6) for prompt in prompts]

        async def flap() -> None:
            while True:
                await asyncio.sleep(chance.uniform(0.0, 0.1))
                if chance.random() < 0.5:
                    rig.d.links.drop(rig.p.identity.incarnation)
                else:
                    rig.p.links.drop(rig.d.identity.incarnation)

        flapping = asyncio.create_task(flap())
        try:
            for prompt, key in zip(prompts, keys, strict=True):
                assert await rig.result(key) == expected_tokens(prompt, 6)
        finally:
            flapping.cancel()
        await rig.whole()


@pytest.mark.parametrize("seed", [1, 2])
async def test_random_requests_random_cancels(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    options = {"pages": 60, "prefill_pages": 50, "token_budget": 24, "max_batch": 16}
    async with running(tmp_path, **options) as rig:
        shared = random_prompt(300, 40)

        async def one() -> None:
            await asyncio.sleep(chance.uniform(0, 1.5))
            prompt = [*shared[: chance.choice([0, 0, 17, 40])], *random_prompt(chance.randrange(10**6), 8)]
            count = chance.randrange(1, 15)
            key = rig.start(prompt, count, start_now=chance.random() < 0.7)
            if chance.random() < 0.5:
                await asyncio.sleep(chance.choice([0.0, 0.01, 0.05, 0.3]))
                halves = [rig.p, rig.d]
                chance.shuffle(halves)
                for worker in halves:
                    worker.driver.drop([key])
                    await asyncio.sleep(chance.choice([0.0, 0.0, 0.02]))
            else:
                assert await rig.result(key) == expected_tokens(prompt, count)

        async with asyncio.TaskGroup() as group:
            for _ in range(200):
                group.create_task(one())
            for _ in range(3):
                await asyncio.sleep(chance.uniform(0.1, 0.5))
                rig.d.links.drop(rig.p.identity.incarnation)
        await rig.whole()


def test_no_handover_does_nothing() -> None:
    handover = NoHandover()
    key = SequenceKey(1, 1, 0, 0)
    handover.attach(lambda event: None, lambda result: None)
    handover.submitted(Request(key, [1], SamplingParams()), None)
    handover.gone(key)
    handover.tick(0.0)
    handover.check(idle=True)
    assert handover.hook is None


async def test_checks_name_what_is_left(tmp_path: Path) -> None:
    async with running(tmp_path) as rig:
        prefill, decode = rig.requests([1, 2, 3], 5, start_now=False)
        rig.p.submit(prefill, rig.d)
        await rig.p.settled(lambda: bool(rig.p.handover._prefills))
        with pytest.raises(TwostrokeError, match="left"):
            rig.p.handover.check(idle=True)
        rig.d.submit(decode, rig.p)
        assert await rig.result(decode.key) == expected_tokens([1, 2, 3], 5)
        await rig.whole()
