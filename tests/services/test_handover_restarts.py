"""Workers that end or stop in the middle of a push, and what their successors find."""

import asyncio
import signal
from pathlib import Path

from twostroke.errors import HandoverExpired
from twostroke.kvtransfer.shm import HEADER_BYTES, file_name, sweep

from .handover_rig import DecodeWorker, expected_tokens, random_prompt
from .test_handover_processes import Child, child, maps, start, started

PAGE_BYTES = 2 * 4 * 2 * 4  # of one layer of the rig's pools


def mapped(pid: int, incarnation: int) -> bool:
    """Whether that process maps that pool."""
    return file_name(incarnation) in Path(f"/proc/{pid}/maps").read_text()


async def pushing(directory: Path, d: Child) -> None:
    """Until something lies in that decode worker's pages."""
    path = directory / file_name(d.peer.incarnation)
    while not any(path.read_bytes()[HEADER_BYTES + PAGE_BYTES : HEADER_BYTES + 65 * PAGE_BYTES]):
        await asyncio.sleep(0.005)


async def let_go(pid: int, incarnation: int) -> None:
    """Until that process has unmapped that pool."""
    while mapped(pid, incarnation):
        await asyncio.sleep(0.01)


def whole_pool(directory: Path, incarnation: int) -> bool:
    """Whether every byte of that pool has memory behind it."""
    status = (directory / file_name(incarnation)).stat()
    return status.st_blocks * 512 >= status.st_size > 0


async def test_a_decode_worker_killed_under_a_push_leaves_all_memory_to_its_successor(tmp_path: Path) -> None:
    async with child("prefill", tmp_path, layer_s=0.03) as p:
        async with child("decode", tmp_path) as d:
            for seed in range(3):
                start(p, d, seed, random_prompt(seed, 120), 8)
            await pushing(tmp_path, d)
            d.process.kill()
            await d.gone()
        await let_go(p.process.pid, d.peer.incarnation)
        assert sweep(tmp_path) == 1  # nobody maps it any more: its memory is the system's again
        async with child("decode", tmp_path) as d:
            assert whole_pool(tmp_path, d.peer.incarnation)
            files = {path.name for path in tmp_path.glob("*.kv")}
            assert files == {file_name(p.peer.incarnation), file_name(d.peer.incarnation)}
            start(p, d, 99, random_prompt(9, 240), 8)  # takes nearly all of its pages
            assert (await d.said())["event"] == "first"
            assert (await d.said())["tokens"] == expected_tokens(random_prompt(9, 240), 8)


async def test_a_prefill_worker_killed_under_its_push_leaves_all_memory_to_its_successor(tmp_path: Path) -> None:
    async with started(DecodeWorker("d", tmp_path, 65, 10.0)) as d:
        async with child("prefill", tmp_path, layer_s=0.03) as p:
            keys = [start(p, d, seed, random_prompt(seed, 70), 8) for seed in range(3)]
            await d.settled(lambda: d.core.load().held_pages > 0 and bool(d.pool[:, 1:].any()))
            assert not maps(p.peer.incarnation)
            p.process.kill()
            for key in keys:
                await d.ended(key)
                assert isinstance(d.failures[key], HandoverExpired)
        await d.all_whole()
        assert sweep(tmp_path) == 1
        async with child("prefill", tmp_path, address=p.peer.address) as p:
            assert whole_pool(tmp_path, p.peer.incarnation)
            key = start(p, d, 99, random_prompt(9, 240), 8)
            await d.ended(key)
            assert d.tokens[key] == expected_tokens(random_prompt(9, 240), 8)
            await d.all_whole()


async def test_a_writer_that_wakes_after_its_ticket_was_revoked(tmp_path: Path) -> None:
    """Its pages are nobody's until it has said that it stopped, though the request is long over."""
    async with (
        child("prefill", tmp_path, layer_s=0.03) as p,
        started(DecodeWorker("d", tmp_path, 65, 60.0, ticket_valid_s=0.4)) as d,
    ):
        prompt = random_prompt(1, 150)
        key = start(p, d, 1, prompt, 8)
        await d.settled(lambda: bool(d.pool[:, 1:].any()))  # the first chunk is there
        p.process.send_signal(signal.SIGSTOP)
        await d.ended(key)
        assert isinstance(d.failures[key], HandoverExpired)
        load = await d.driver.call(d.core.load)
        assert load.held_pages == -(-150 // 4)
        assert load.free_pages == load.pages - load.held_pages
        p.process.send_signal(signal.SIGCONT)
        await d.all_whole()
        again = start(p, d, 2, prompt[:20], 8)
        await d.ended(again)
        assert d.tokens[again] == expected_tokens(prompt[:20], 8)
