"""Pages that do not arrive as they were sent: every one is noticed and sent again; none is ever read."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from twostroke.engine.request import FinishReason, SequenceKey, SequenceOutput, StepResult
from twostroke.errors import HandoverExpired
from twostroke.kvtransfer.nixl_agent import why_missing
from twostroke.kvtransfer.pool_pages import pool_bytes
from twostroke.services.handover import kv_pool

from ...kvtransfer.faulty_transport import DAMAGE, LATE, Faults, FaultyTransport
from ..handover_rig import DecodeWorker, PrefillWorker, Rig, expected_tokens, random_prompt, running

REQUESTS = 30
WAYS = [
    "shm",
    pytest.param("nixl", marks=pytest.mark.skipif(bool(why_missing()), reason=why_missing() or "there")),
]


@asynccontextmanager
async def damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, faults: Faults, *, way: str = "shm", **options: float
) -> AsyncIterator[Rig]:
    """A rig whose transport is `faults`'s."""
    for name in ("ShmTransport", "NixlTransport"):
        real = getattr(kv_pool, name)
        monkeypatch.setattr(
            kv_pool, name, lambda *given, real=real, **named: FaultyTransport(real(*given, **named), faults)
        )
    async with running(tmp_path, token_budget=24, ways=(way,), **options) as rig:
        pages = pool_bytes(rig.d.pool).numpy()
        faults.target = lambda layer: pages[layer]
        yield rig


def prompt(seed: int) -> list[int]:
    """1 to 85 tokens: pages full and not, of chunks one and several."""
    return random_prompt(500 + seed, 1 + seed * 17 % 85)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", [*DAMAGE, LATE, "all"])
async def test_all_damage_is_noticed_and_sent_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, way: str
) -> None:
    faults = Faults((*DAMAGE, LATE) if kind == "all" else (kind,))
    async with damaged(tmp_path, monkeypatch, faults, way=way) as rig:
        keys = [rig.start(prompt(seed), 6) for seed in range(REQUESTS)]
        for seed, key in enumerate(keys):
            assert await rig.result(key) == expected_tokens(prompt(seed), 6)
        await rig.whole()
        told = rig.d.handover.traffic.mismatches
        assert (told.pages, told.resent, told.tickets) == (len(faults.damaged), len(faults.damaged), 0)
        assert bool(faults.damaged) is (kind != LATE)
        assert bool(faults.delayed) is (kind in (LATE, "all"))
        assert not rig.p.failures


async def test_a_single_bit_of_any_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One page after another, each with another bit turned over."""
    faults = Faults(("flip",), share=1.0, seed=5)
    async with damaged(tmp_path, monkeypatch, faults) as rig:
        for seed in range(40):
            alone = random_prompt(900 + seed, 4)
            assert await rig.generate(alone, 3) == expected_tokens(alone, 3)
        assert rig.d.handover.traffic.mismatches.pages == len(faults.damaged) == 40
        await rig.whole()


async def test_what_fails_twice_is_computed_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a gateway does: another attempt for what the decode worker gave up. Nothing of the first one is told."""
    faults = Faults(tuple(DAMAGE), share=0.5, again=True, seed=2)
    async with damaged(tmp_path, monkeypatch, faults) as rig:
        given_up = 0

        async def ask(seed: int) -> None:
            nonlocal given_up
            prefill, decode = rig.requests(prompt(seed), 6)
            while True:
                rig.p.submit(prefill, rig.d)
                rig.d.submit(decode, rig.p)
                try:
                    assert await rig.result(decode.key) == expected_tokens(prompt(seed), 6)
                    return
                except HandoverExpired as error:
                    assert "digests" in str(error)
                    assert decode.key not in rig.d.tokens
                    given_up += 1
                key = decode.key._replace(attempt=decode.key.attempt + 1)
                prefill, decode = replace(prefill, key=key), replace(decode, key=key)

        async with asyncio.TaskGroup() as group:
            for seed in range(REQUESTS):
                group.create_task(ask(seed))
        await rig.whole()
        told = rig.d.handover.traffic.mismatches
        assert told.tickets == given_up > 0
        assert told.pages == len(faults.damaged)
        assert told.resent == sum(round_ == 0 for _, _, round_, _ in faults.damaged)
        assert max(round_ for _, _, round_, _ in faults.damaged) == 1  # sent again once, never twice


def count_preempted(worker: PrefillWorker | DecodeWorker) -> list[SequenceKey]:
    """Grows by each sequence that loses its pages."""
    seen: list[SequenceKey] = []
    stepped = worker.handover.stepped

    def note(result: StepResult) -> list[SequenceOutput]:
        seen.extend(result.preempted)
        return stepped(result)

    worker.handover.stepped = note  # type: ignore[method-assign]
    return seen


async def test_damage_under_preemption(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pools so small that sequences lose their pages on either side: stale pages are other sequences' here."""
    faults = Faults((*DAMAGE, LATE), seed=3)
    options = {"pages": 40, "prefill_pages": 26, "max_batch": 8, "unticketed_share": 1.0}
    async with damaged(tmp_path, monkeypatch, faults, **options) as rig:
        preempted = [count_preempted(worker) for worker in (rig.p, rig.d)]
        early = [rig.requests(prompt(seed), 40) for seed in range(4)]
        for prefill, _ in early:
            rig.p.submit(prefill, rig.d)
        await rig.p.until(lambda: early[0][0].key in rig.p.tokens)  # it waits for its ticket, and so do others
        keys = [rig.start(prompt(seed), 40, start_now=False) for seed in range(4, REQUESTS)]
        await rig.d.ended(keys[3])
        for _, decode in early:
            rig.d.submit(decode, rig.p)
        for seed, key in enumerate([*(prefill.key for prefill, _ in early), *keys]):
            assert await rig.result(key) == expected_tokens(prompt(seed), 40)
            assert rig.d.finishes[key] is FinishReason.LENGTH
        await rig.whole()
        assert rig.d.handover.traffic.mismatches.pages == len(faults.damaged) > 0
        counts = [
            await worker.driver.call(lambda worker=worker: worker.core.load().preemptions) for worker in (rig.p, rig.d)
        ]
        assert all(counts)
        assert counts == [len(keys) for keys in preempted]
