"""How much more several gateway processes on one port carry than one, each on a core of its own."""

import asyncio
import contextlib
import itertools
import os
import subprocess
import time
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

from gateway_load import Board
from gateway_model import make_model
from gateway_rig import START_S, cpu_of, gateway_process, process, ready

LOAD = Path(__file__).with_name("gateway_load.py")
STREAMS = 200  # for each gateway process
WORKERS = 8  # the same, as are these processes:
WORKER_PROCESSES, CLIENT_PROCESSES = 2, 3


class Carried(NamedTuple):
    """Messages of a token each by the second, of the wall and of the gateway's CPU; streams that moved the least and
    the most, in messages by the second."""

    rate: float
    per_cpu_second: float
    least: float
    most: float


async def carried(processes: int, cores: Collection[int], folder: Path, seconds: float) -> Carried:
    """By so many gateway processes on as many of these cores; the others are the clients' and workers'."""
    listed = sorted(cores)
    own, rest = listed[:processes], listed[processes:] or listed
    streams = STREAMS * processes
    path = folder / f"board-{processes}"
    board = Board(path, streams)
    common = ("--board", str(path), "--streams", str(streams))
    with contextlib.ExitStack() as stack:
        workers: list[str] = []
        for first, count in parts(WORKERS * processes, WORKER_PROCESSES * processes):
            model = folder / f"own-{processes}-{first}" / "bench"  # the same name, and no two write the same files
            model.mkdir(parents=True)
            words = (str(LOAD), "workers", *common, "--model", str(model), "--first", str(first), "--count", str(count))
            workers += await said(stack.enter_context(process(rest, folder / "workers.log", *words)))
        model = folder / f"gateway-{processes}" / "bench"
        model.mkdir(parents=True)
        make_model(model)
        started = gateway_process(own, folder, model, workers, processes)
        address, _, pid = stack.enter_context(started)
        await ready(address, len(workers), folder)
        for first, count in parts(streams, CLIENT_PROCESSES * processes):
            words = (str(LOAD), "clients", *common, "--address", address, "--first", str(first), "--count", str(count))
            stack.enter_context(process(rest, folder / "clients.log", *words))
        async with asyncio.timeout(START_S):
            while not all(board.got):  # noqa: ASYNC110 - other processes write it
                await asyncio.sleep(0.1)
        await asyncio.sleep(1.0)
        cpu = cpu_of(pid)
        began, spent, before = time.perf_counter(), cpu(), list(board.got)
        await asyncio.sleep(seconds)
        took, used = time.perf_counter() - began, cpu() - spent
        moved = [after - at for after, at in zip(board.got, before, strict=True)]
    if not all(moved):
        raise RuntimeError((folder / "clients.log").read_text()[-2000:] or "a stream stands still")
    return Carried(sum(moved) / took, sum(moved) / used, min(moved) / took, max(moved) / took)


def parts(whole: int, count: int) -> list[tuple[int, int]]:
    """(first, length) of so many parts, nearly equal."""
    cuts = [whole * part // count for part in range(count + 1)]
    return [(first, end - first) for first, end in itertools.pairwise(cuts)]


async def said(started: "subprocess.Popen[bytes]") -> list[str]:
    """The words of a process' first line."""
    if started.stdout is None:
        raise RuntimeError("no output")
    return (await asyncio.to_thread(started.stdout.readline)).decode().split()


def enough(processes: int) -> bool:
    """Whether there are cores for all of them, so that a rate says something about the gateway."""
    load = processes * (WORKER_PROCESSES + CLIENT_PROCESSES)
    return len(os.sched_getaffinity(0)) >= processes + load
