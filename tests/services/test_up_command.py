"""The command `twostroke up` itself, over real processes and a tiny model: its words, Ctrl-C, its sudden death."""

import asyncio
import json
import os
import select
import signal
import sys
from asyncio.subprocess import PIPE, STDOUT, Process
from pathlib import Path

from twostroke.services.supervisor.health import Condition, check_once


async def start(model: Path, *flags: str, merged: bool = False) -> Process:
    words = ["up", "--model", str(model), "--prefill", "0", "--decode", "0", "--both", "1", "--kv-memory", "8MiB"]
    words += ["--listen", "127.0.0.1:0", "--threads", "1", *flags]
    command = [sys.executable, "-m", "twostroke.services.cli", *words]
    return await asyncio.create_subprocess_exec(*command, stdout=PIPE, stderr=STDOUT if merged else PIPE)


async def line_with(process: Process, text: str) -> tuple[str, list[str]]:
    """The first line of stdout that holds `text`, and those before it."""
    assert process.stdout is not None
    before: list[str] = []
    async with asyncio.timeout(60):
        async for raw in process.stdout:
            line = raw.decode()
            if text in line:
                return line, before
            before.append(line)
    raise AssertionError("".join(before))


async def test_for_people(tiny_llama_dir: Path) -> None:
    process = await start(tiny_llama_dir, merged=True)
    try:
        ask, before = await line_with(process, "Ask it something")
        table = "".join(before)
        address = ask.split("--address ")[1].split()[0]
        assert "twostroke serves" in table
        assert "gateway: ready on " + address in table
        assert "both-0" in table
        assert await check_once(address, 5) is Condition.SERVING
        process.send_signal(signal.SIGINT)
        rest, _ = await asyncio.wait_for(process.communicate(), 60)
        assert process.returncode == 0, rest
        assert b"answers under way may finish" in rest
        assert rest.rstrip().endswith(b"stopped")
        assert b"Traceback" not in rest
        assert await check_once(address, 1) is Condition.SILENT
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_nothing_outlives_a_killed_supervisor(tiny_llama_dir: Path) -> None:
    process = await start(tiny_llama_dir, "--json", "--log-level", "error")
    handles: list[int] = []
    try:
        line, _ = await line_with(process, '"serving"')
        handles = [os.pidfd_open(child["pid"]) for child in json.loads(line)["processes"]]
        assert len(handles) == 2
        process.kill()
        await asyncio.wait_for(process.wait(), 10)
        for handle in handles:
            assert select.select([handle], [], [], 10)[0], "a child lives on"
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        for handle in handles:
            os.close(handle)


async def test_a_model_that_cannot_be_used(tmp_path: Path) -> None:
    process = await start(tmp_path)  # an empty directory
    out, err = await asyncio.wait_for(process.communicate(), 30)
    assert process.returncode == 2
    assert out == b""
    assert err.startswith(b"error: ")
    assert b"Traceback" not in err
