"""Workers and gateway started one by one, without a supervisor: a role changes at the same address, signals pass."""

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc.aio

from twostroke.services.grpc_setup import open_channel
from twostroke.services.supervisor.machine import free_ports

from .harness import Client

CLI = (sys.executable, "-m", "twostroke.services.cli")


@contextlib.asynccontextmanager
async def process(log: Path, *words: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """Ended by SIGTERM at the end, and checked to have ended well."""
    with log.open("wb") as errors:
        it = await asyncio.create_subprocess_exec(*CLI, *words, stderr=errors)
    try:
        yield it
        it.send_signal(signal.SIGTERM)
        async with asyncio.timeout(30):
            assert await it.wait() == 0, log.read_text()
    finally:
        if it.returncode is None:
            it.kill()
        await it.wait()


async def workers(address: str, *words: str) -> str:
    """The output of `twostroke workers`."""
    it = await asyncio.create_subprocess_exec(
        *CLI, "workers", *words, "--address", address, stdout=asyncio.subprocess.PIPE
    )
    output, _ = await it.communicate()
    assert it.returncode == 0, output
    return output.decode()


async def listed(address: str) -> dict[str, dict[str, Any]]:
    return {worker["name"]: worker for worker in json.loads(await workers(address, "list", "--json"))}


def children(pid: int) -> list[int]:
    """Process ids."""
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


async def test_a_worker_that_nobody_supervises_changes_its_role(tiny_dir: Path, tmp_path: Path) -> None:
    common = ("--model", str(tiny_dir), "--dtype", "float32", "--kv-memory", "8MiB", "--threads", "1", "--shm-dir")
    ports = free_ports(3)
    places = [f"127.0.0.1:{port}" for port in ports]
    async with contextlib.AsyncExitStack() as stack:
        launchers = {}
        for name, role, place in (("w0", "decode", places[0]), ("w1", "decode", places[1])):
            words = (role, "--listen", place, "--name", name, *common, str(tmp_path))
            launchers[name] = await stack.enter_async_context(process(tmp_path / f"{name}.log", *words))
        named = f"{places[0]},localhost:{ports[1]}"
        gateway = ("gateway", "--listen", places[2], "--workers", named, "--disaggregate", "always")
        await stack.enter_async_context(process(tmp_path / "gateway.log", *gateway, "--model", str(tiny_dir)))
        channel = await stack.enter_async_context(open_channel(places[2]))
        client = Client(channel)
        async with asyncio.timeout(60):
            while True:
                with contextlib.suppress(grpc.aio.AioRpcError, AssertionError):
                    if all(worker["state"] == "ready" for worker in (await listed(places[2])).values()):
                        break
                await asyncio.sleep(0.2)
        alone = await client.tokens([5, 6, 7] * 20, max_tokens=40)
        assert alone.finish.prefill_worker == alone.finish.decode_worker
        before = children(launchers["w1"].pid)
        await workers(places[2], "role", "w1", "prefill")
        after = children(launchers["w1"].pid)
        assert len(before) == len(after) == 1
        assert before != after
        assert (await listed(places[2]))["w1"]["role"] == "prefill"
        both = await client.tokens([5, 6, 7] * 20, max_tokens=40)
        assert (both.finish.prefill_worker, both.finish.decode_worker) == ("w1", "w0")
        assert both.token_ids == alone.token_ids
    for pid in (*before, *after):
        assert not os.path.exists(f"/proc/{pid}")
    assert not list(tmp_path.glob("twostroke*")), "a KV pool was left behind"
