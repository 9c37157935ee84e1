"""The hand-over between processes that die, freeze and come back."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from twostroke.engine.request import Request, SamplingParams, SequenceKey, Work
from twostroke.errors import HandoverExpired
from twostroke.kvtransfer.shm import sweep
from twostroke.services.handover.handover import PeerAddress

from .handover_rig import GATEWAY, DecodeWorker, PrefillWorker, Worker, expected_tokens, random_prompt

ROOT = Path(__file__).parents[2]
NOWHERE = PeerAddress("127.0.0.1:1", 1)


class Child:
    """A worker in another process."""

    def __init__(self, process: asyncio.subprocess.Process, peer: PeerAddress) -> None:
        self.process = process
        self.peer = peer

    def submit(self, request: Request, peer: PeerAddress) -> None:
        """One half of a request."""
        line = {
            "key": list(request.key),
            "prompt": request.prompt_ids,
            "count": request.params.max_tokens,
            "peer": [peer.address, peer.incarnation],
        }
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(line).encode() + b"\n")

    async def said(self) -> dict[str, Any]:
        """Its next line."""
        assert self.process.stdout is not None
        line: dict[str, Any] = json.loads(await self.process.stdout.readline())
        return line

    async def gone(self) -> int:
        """Its exit status."""
        return await self.process.wait()


@asynccontextmanager
async def child(
    role: str,
    directory: Path,
    *,
    address: str = "127.0.0.1:0",
    silence_s: float = 10.0,
    layer_s: float = 0.0,
    ways: str = "shm",
) -> AsyncIterator[Child]:
    """Started; killed at the end."""
    numbers = map(str, (silence_s, layer_s))
    arguments = ["-m", "tests.services.handover_child", role, str(directory), address, *numbers, ways]
    paths = os.pathsep.join([str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
    kept = {name: value for name, value in os.environ.items() if name.startswith("UCX_")}
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *arguments,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        cwd=ROOT,
        env={**kept, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"},
    )
    try:
        assert process.stdout is not None
        hello = json.loads(await process.stdout.readline())
        yield Child(process, PeerAddress(hello["address"], hello["incarnation"]))
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


@asynccontextmanager
async def started(worker: Any) -> AsyncIterator[Any]:
    """A worker in this process."""
    await worker.start()
    try:
        yield worker
    finally:
        await worker.stop()


def halves(number: int, prompt: list[int], count: int, writer: int) -> tuple[Request, Request]:
    key = SequenceKey(GATEWAY, number, 0, 0)
    params = SamplingParams(temperature=0.0, max_tokens=count)
    return Request(key, prompt, params, Work.PREFILL), Request(key, list(prompt), params, Work.DECODE, writer=writer)


def start(p: Child | PrefillWorker, d: Child | DecodeWorker, number: int, prompt: list[int], count: int) -> SequenceKey:
    """Both halves of a request."""
    prefill, decode = halves(number, prompt, count, p.peer.incarnation)
    p.submit(prefill, d.peer)
    d.submit(decode, p.peer)
    return prefill.key


def maps(incarnation: int) -> int:
    """Mappings of that pool in this process."""
    return Path("/proc/self/maps").read_text().count(f"{incarnation:016x}.kv")


async def serves_alone(worker: Worker, number: int) -> None:
    key = SequenceKey(GATEWAY, number, 0, 0)
    worker.submit(Request(key, [1, 2, 3], SamplingParams(temperature=0.0, max_tokens=4)), None)
    await worker.ended(key)
    assert worker.tokens[key] == expected_tokens([1, 2, 3], 4)


async def test_a_killed_prefill_worker(tmp_path: Path) -> None:
    async with (
        child("prefill", tmp_path, layer_s=0.02) as p,
        started(DecodeWorker("d", tmp_path, 65, 10.0)) as d,
    ):
        prompt = random_prompt(1, 40)
        key = start(p, d, 1, prompt, 8)
        await d.ended(key)
        assert d.tokens[key] == expected_tokens(prompt, 8)

        keys = [start(p, d, 2 + seed, random_prompt(2 + seed, 100), 8) for seed in range(3)]
        await d.settled(lambda: d.core.load().held_pages > 40)  # pages are reserved and tickets are out
        p.process.kill()
        for key in keys:
            await d.ended(key)
            assert isinstance(d.failures[key], HandoverExpired)
        await d.all_whole()

        again = start(p, d, 9, prompt, 8)  # the gateway has not heard of it yet
        await d.ended(again)
        assert isinstance(d.failures[again], HandoverExpired)
        await serves_alone(d, 10)
        await d.all_whole()


async def test_a_prefill_worker_that_comes_back_as_another(tmp_path: Path) -> None:
    async with started(DecodeWorker("d", tmp_path, 65, 10.0)) as d:
        async with child("prefill", tmp_path) as old:
            key = start(old, d, 1, [1, 2, 3], 3)
            await d.ended(key)
        async with child("prefill", tmp_path, address=old.peer.address) as new:
            assert new.peer.address == old.peer.address
            assert new.peer.incarnation != old.peer.incarnation
            key = start(new, d, 2, [1, 2, 3, 4, 5], 3)
            await d.ended(key)
            assert d.tokens[key] == expected_tokens([1, 2, 3, 4, 5], 3)
            _, decode = halves(3, [1, 2, 3], 3, old.peer.incarnation)
            d.submit(decode, old.peer)
            await d.ended(decode.key)
            assert isinstance(d.failures[decode.key], HandoverExpired)
            never = PeerAddress(new.peer.address, new.peer.incarnation ^ 1)  # gone before there was a link
            _, decode = halves(4, [1, 2, 3], 3, never.incarnation)
            d.submit(decode, never)
            await d.ended(decode.key)
            assert "incarnation" in str(d.failures[decode.key])
            await d.all_whole()


async def test_a_prefill_worker_that_pauses_loses_nothing_and_a_frozen_one_is_fenced(tmp_path: Path) -> None:
    async with (
        child("prefill", tmp_path, layer_s=0.01) as p,
        started(DecodeWorker("d", tmp_path, 65, 3.0)) as d,
    ):
        prompts = [random_prompt(seed, 60) for seed in range(3)]
        keys = [start(p, d, seed, prompt, 20) for seed, prompt in enumerate(prompts)]
        await d.settled(lambda: d.core.load().held_pages > 0)
        p.process.send_signal(signal.SIGSTOP)
        await asyncio.sleep(1.0)
        p.process.send_signal(signal.SIGCONT)
        for prompt, key in zip(prompts, keys, strict=True):
            await d.ended(key)
            assert d.tokens[key] == expected_tokens(prompt, 20)
        await d.all_whole()

        key = start(p, d, 9, random_prompt(1, 200), 20)
        await d.settled(lambda: d.core.load().held_pages > 0)
        p.process.send_signal(signal.SIGSTOP)
        await d.ended(key)
        assert isinstance(d.failures[key], HandoverExpired)
        assert await p.gone() == -signal.SIGKILL
        await d.all_whole()


async def test_one_that_died_after_complete_costs_nothing(tmp_path: Path) -> None:
    """Its last word waits for a decode worker that is in the middle of a step."""
    async with (
        child("prefill", tmp_path) as p,
        started(DecodeWorker("d", tmp_path, 65, 10.0)) as d,
    ):
        key = start(p, d, 1, [1, 2, 3], 3)
        await d.ended(key)
        assert (await p.said())["number"] == 1
        prompt = random_prompt(2, 50)
        prefill, decode = halves(2, prompt, 9, p.peer.incarnation)
        p.submit(prefill, d.peer)
        assert (await p.said())["number"] == 2  # computed, waits for its ticket
        completed = asyncio.Event()
        received = d.handover.received

        def note(writer: int, message: Any) -> None:
            received(writer, message)
            if type(message).__name__ == "Complete":
                p.process.kill()
                completed.set()

        d.handover.received = note  # type: ignore[method-assign]
        d.submit(decode, p.peer)
        await completed.wait()
        await d.ended(decode.key)
        assert d.tokens[decode.key] == expected_tokens(prompt, 9)
        await d.all_whole()


async def test_a_killed_decode_worker(tmp_path: Path) -> None:
    async with started(PrefillWorker("p", tmp_path, 65, 10.0, token_budget=16)) as p:
        async with child("decode", tmp_path) as d:
            key = start(p, d, 1, [1, 2, 3], 3)
            assert (await d.said())["event"] == "first"
            assert (await d.said())["tokens"] == expected_tokens([1, 2, 3], 3)
            await p.all_whole()
            assert maps(d.peer.incarnation) >= 1
            doomed = [d.process.pid]
            p.runner.after_layer = lambda layer, rows: (
                os.kill(doomed.pop(), signal.SIGKILL) if layer == 1 and doomed else None
            )
            keys = [start(p, d, 2 + seed, random_prompt(seed, 80), 8) for seed in range(2)]
            await d.gone()
            p.runner.after_layer = lambda layer, rows: None
            await p.settled(lambda: not maps(d.peer.incarnation))
        await p.until(lambda: all(key in p.tokens for key in keys))  # token 0 is computed all the same
        await p.all_whole()
        assert sweep(tmp_path) == 1

        async with child("decode", tmp_path) as other:
            key = start(p, other, 9, random_prompt(0, 80), 8)
            await p.until(lambda: key in p.tokens)
            assert (await other.said())["event"] == "first"
            assert (await other.said())["tokens"] == expected_tokens(random_prompt(0, 80), 8)
            await p.all_whole()


async def test_a_decode_worker_that_pauses_loses_nothing_and_a_frozen_one_is_fenced(tmp_path: Path) -> None:
    async with (
        started(PrefillWorker("p", tmp_path, 65, 3.0, token_budget=16)) as p,
        child("decode", tmp_path, layer_s=0.002) as d,
    ):
        prompts = [random_prompt(seed, 70) for seed in range(3)]
        for seed, prompt in enumerate(prompts):
            start(p, d, seed, prompt, 12)
        await d.said()
        d.process.send_signal(signal.SIGSTOP)
        await asyncio.sleep(1.0)
        d.process.send_signal(signal.SIGCONT)
        ended: dict[int, list[int]] = {}
        while len(ended) < 3:
            line = await d.said()
            if line["event"] == "ended":
                ended[line["number"]] = line["tokens"]
        assert ended == {seed: expected_tokens(prompt, 12) for seed, prompt in enumerate(prompts)}
        await p.all_whole()

        d.process.send_signal(signal.SIGSTOP)
        prefill, _ = halves(9, random_prompt(3, 60), 5, p.peer.incarnation)
        p.submit(prefill, d.peer)
        await p.until(lambda: prefill.key in p.tokens)
        assert await d.gone() == -signal.SIGKILL
        await p.settled(lambda: not maps(d.peer.incarnation))
        await p.all_whole()
