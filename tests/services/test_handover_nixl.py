"""The hand-over by NIXL: as between hosts, with processes that die and connections that break."""

import asyncio
import dataclasses
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from twostroke.errors import HandoverExpired
from twostroke.kvtransfer.nixl_agent import why_missing
from twostroke.services.handover.link_server import LinkServer
from twostroke.services.handover.pool_opener import PoolOpener

from .handover_rig import DecodeWorker, PrefillWorker, Rig, expected_tokens, form, random_prompt, running
from .test_handover_processes import child, serves_alone, start, started

pytestmark = pytest.mark.skipif(bool(why_missing()), reason=why_missing() or "there")

NIXL = ("nixl",)


@pytest.fixture(autouse=True)
def _tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    """As between hosts."""
    monkeypatch.setenv("UCX_TLS", "tcp")


def pairs(rig: Rig) -> list[str]:
    """Transports that the prefill worker exports."""
    return [pair.transport for pair in rig.p.handover.traffic.pairs.values()]


async def test_requests_are_answered_and_every_page_comes_back(tmp_path: Path) -> None:
    async with running(tmp_path, ways=NIXL) as rig:
        prompts = [random_prompt(seed, 30 + 17 * seed) for seed in range(4)]
        keys = [rig.start(prompt, 6) for prompt in prompts]
        for prompt, key in zip(prompts, keys, strict=True):
            assert await rig.result(key) == expected_tokens(prompt, 6)
        assert pairs(rig) == ["nixl"]
        [pair] = rig.p.handover.traffic.pairs.values()
        assert pair.gb_per_s > 0
        await rig.whole()


async def test_workers_of_one_host_prefer_its_memory(tmp_path: Path) -> None:
    async with running(tmp_path, ways=("shm", "nixl")) as rig:
        assert await rig.generate([1, 2, 3], 3) == expected_tokens([1, 2, 3], 3)
        assert pairs(rig) == ["shm"]
        assert not rig.d.exports.has(rig.p.identity.incarnation)


async def test_workers_that_share_no_memory_take_nixl(tmp_path: Path) -> None:
    async with running(tmp_path, ways=("shm", "nixl")) as rig:
        rig.d.links._offer = offer_elsewhere(rig)
        prompt = random_prompt(3, 40)
        assert await rig.generate(prompt, 5) == expected_tokens(prompt, 5)
        assert pairs(rig) == ["nixl"]
        await rig.whole()


def offer_elsewhere(rig: Rig) -> Any:
    """An offer whose file cannot be found from here."""
    offer = rig.d.links._offer
    path = offer.descriptor.replace(b"/twostroke-", b"/elsewhere/twostroke-")
    return type(offer)(offer.pool, offer.pages, offer.page_bytes, path, offer.transport, offer.further)


async def test_cancelled_on_either_side(tmp_path: Path) -> None:
    async with running(tmp_path, ways=NIXL) as rig:
        await rig.generate([1], 2)
        for number, side in enumerate((rig.p, rig.d, rig.p, rig.d)):
            key = rig.start(random_prompt(number, 120), 30)
            await rig.p.until(lambda key=key: key in rig.p.tokens)  # type: ignore[misc]
            for worker in (side, rig.p, rig.d):
                worker.driver.drop([key])
            await rig.whole()
        prompt = random_prompt(9, 50)
        assert await rig.generate(prompt, 4) == expected_tokens(prompt, 4)


async def test_a_link_that_breaks_keeps_its_export(tmp_path: Path) -> None:
    async with running(tmp_path, ways=NIXL) as rig:
        await rig.generate([1], 2)
        [transport] = rig.p.handover._pools._transports.values()
        key = rig.start(random_prompt(1, 100), 5)
        rig.p.links.drop(rig.d.identity.incarnation)
        assert await rig.result(key) == expected_tokens(random_prompt(1, 100), 5)
        assert list(rig.p.handover._pools._transports.values()) == [transport]
        await rig.whole()


async def test_a_connection_that_breaks_is_made_anew(tmp_path: Path) -> None:
    """Both processes live: the decode worker closes what it had opened before the prefill worker says anything."""
    async with running(tmp_path, ways=NIXL) as rig:
        await rig.generate([1], 2)
        writer = rig.p.identity.incarnation
        [old] = rig.p.handover._pools._transports.values()
        await asyncio.to_thread(rig.d.exports.revoke, writer)  # as a broken network looks to the prefill worker
        prompts = [random_prompt(seed, 90) for seed in range(3)]
        keys = [rig.start(prompt, 5) for prompt in prompts]
        for prompt, key in zip(prompts, keys, strict=True):
            assert await rig.result(key) == expected_tokens(prompt, 5)
        [new] = rig.p.handover._pools._transports.values()
        assert new is not old
        await rig.whole()


async def test_a_writer_of_another_host_that_was_replaced_loses_its_access_and_thus_its_pages(tmp_path: Path) -> None:
    """Its death cannot be proven; that nothing of it reaches the pool any more can."""
    async with running(tmp_path, ways=NIXL) as rig:
        rig.p.links._handshake._identity = dataclasses.replace(rig.p.identity, host="elsewhere")
        await rig.generate([1], 2)
        await rig.whole()
        _, decode = rig.requests(random_prompt(1, 40), 5)
        rig.d.submit(decode, rig.p)
        await rig.d.settled(lambda: rig.d.core.load().held_pages == 10)
        assert rig.p.server is not None
        await rig.p.server.stop(0)
        another = dataclasses.replace(rig.p.identity, incarnation=9)
        successor = LinkServer(another, form(), rig.p.liveness, PoolOpener({}), page_bytes=rig.p.page_bytes)
        successor.attach(rig.p.handover)
        await rig.p.start_server(successor)
        await rig.d.ended(decode.key)
        assert "incarnation" in str(rig.d.failures[decode.key])
        await rig.d.all_whole()
        assert not rig.d.exports.has(rig.p.identity.incarnation)


async def test_a_slow_pair_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of pages as small as these little is asked for, so that a fast machine would have it."""
    monkeypatch.setattr("twostroke.services.handover.pool_opener.expected", lambda least, page_bytes: 1e6)
    async with running(tmp_path, ways=NIXL, silence_s=4.0) as rig:
        with pytest.raises(HandoverExpired, match="allow_slow_transport"):
            await rig.generate([1, 2, 3], 3)
        rig.p.opener._allow_slow = True
        assert await rig.generate([1, 2, 4], 3) == expected_tokens([1, 2, 4], 3)


async def test_a_killed_prefill_worker(tmp_path: Path) -> None:
    async with (
        child("prefill", tmp_path, layer_s=0.02, ways="nixl") as p,
        started(DecodeWorker("d", tmp_path, 65, 10.0, ways=NIXL)) as d,
    ):
        prompt = random_prompt(1, 40)
        key = start(p, d, 1, prompt, 8)
        await d.ended(key)
        assert d.tokens[key] == expected_tokens(prompt, 8)
        assert d.exports.has(p.peer.incarnation)
        keys = [start(p, d, 2 + seed, random_prompt(2 + seed, 100), 8) for seed in range(3)]
        await d.settled(lambda: d.core.load().held_pages > 40)
        p.process.kill()
        for key in keys:
            await d.ended(key)
            assert isinstance(d.failures[key], HandoverExpired)
        await d.all_whole()
        assert not d.exports.has(p.peer.incarnation)  # closed before its pages were free
        await serves_alone(d, 10)


async def test_a_killed_decode_worker_and_its_successor(tmp_path: Path) -> None:
    async with started(PrefillWorker("p", tmp_path, 65, 10.0, token_budget=16, ways=NIXL)) as p:
        async with child("decode", tmp_path, ways="nixl") as d:
            start(p, d, 1, [1, 2, 3], 3)
            assert (await d.said())["event"] == "first"
            assert (await d.said())["tokens"] == expected_tokens([1, 2, 3], 3)
            await p.all_whole()
            doomed = [d.process.pid]
            p.runner.after_layer = lambda layer, rows: (
                os.kill(doomed.pop(), signal.SIGKILL) if layer == 1 and doomed else None
            )
            keys = [start(p, d, 2 + seed, random_prompt(seed, 80), 8) for seed in range(2)]
            await d.gone()
        await p.until(lambda: all(key in p.tokens for key in keys))
        await p.all_whole()
        assert not p.handover._pools._transports
        assert not p.handover.traffic.pairs
        async with child("decode", tmp_path, ways="nixl") as other:
            key = start(p, other, 9, random_prompt(0, 80), 8)
            await p.until(lambda: key in p.tokens)
            assert (await other.said())["event"] == "first"
            assert (await other.said())["tokens"] == expected_tokens(random_prompt(0, 80), 8)
            await p.all_whole()


async def test_a_decode_worker_that_pauses_loses_nothing(tmp_path: Path) -> None:
    async with (
        started(PrefillWorker("p", tmp_path, 65, 10.0, token_budget=16, ways=NIXL)) as p,
        child("decode", tmp_path, layer_s=0.002, ways="nixl") as d,
    ):
        prompts = [random_prompt(seed, 70) for seed in range(3)]
        for seed, prompt in enumerate(prompts):
            start(p, d, seed, prompt, 12)
        await d.said()
        d.process.send_signal(signal.SIGSTOP)
        await asyncio.sleep(0.5)
        d.process.send_signal(signal.SIGCONT)
        ended: dict[int, list[int]] = {}
        while len(ended) < 3:
            line = await d.said()
            if line["event"] == "ended":
                ended[line["number"]] = line["tokens"]
        assert ended == {seed: expected_tokens(prompt, 12) for seed, prompt in enumerate(prompts)}
        await p.all_whole()
