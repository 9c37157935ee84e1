"""Handles on processes."""

import asyncio
import os
import select
import subprocess
import sys
from pathlib import Path

import pytest

from twostroke.kvtransfer.process import ProcessHandle, host_id


def child() -> "subprocess.Popen[bytes]":
    return subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)


def test_host_id_is_stable_and_names_kernel_and_namespace() -> None:
    boot, namespace = host_id().split("/")
    assert len(boot) == 36
    assert namespace.isdigit()
    assert host_id() == host_id()


async def test_death_wakes_the_loop_and_kill_is_final() -> None:
    process = child()
    handle = ProcessHandle.open(process.pid, host_id())
    assert handle is not None
    assert handle.alive()
    ended = asyncio.Event()
    asyncio.get_running_loop().add_reader(handle.fileno(), ended.set)
    assert handle.kill()
    await asyncio.wait_for(ended.wait(), 20)
    assert not handle.alive()  # although nobody has waited for it yet
    asyncio.get_running_loop().remove_reader(handle.fileno())
    process.communicate()
    assert not handle.kill()
    handle.close()
    handle.close()
    assert handle.fileno() == -1
    for use in (handle.alive, handle.kill):
        with pytest.raises(ValueError, match="closed"):
            use()


def test_no_handle_where_a_pid_means_nothing() -> None:
    process = child()
    process.communicate()
    assert ProcessHandle.open(process.pid, host_id()) is None
    assert ProcessHandle.open(os.getpid(), "elsewhere/1") is None
    assert ProcessHandle.open(0, host_id()) is None
    assert ProcessHandle.open(-1, host_id()) is None


def test_no_descriptor_leaks() -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        handle = ProcessHandle.open(os.getpid(), host_id())
        assert handle is not None
        assert handle.alive()
        handle.close()
    assert len(os.listdir("/proc/self/fd")) == before


WRITERS = """
import mmap, sys, threading
file = open(sys.argv[1], "r+b")
memory = mmap.mmap(file.fileno(), 1 << 20)

def write(start):
    n = 0
    while True:
        n = (n + 1) % 256
        memory[start : start + (1 << 18)] = bytes([n]) * (1 << 18)

for i in range(1, 4):
    threading.Thread(target=write, args=(i << 18,), daemon=True).start()
print("ready", flush=True)
write(0)
"""


def test_no_byte_changes_once_the_death_is_proven(tmp_path: Path) -> None:
    """What makes a readable pidfd a proof: all threads have ended, and their writes with them."""
    path = tmp_path / "pool"
    path.write_bytes(bytes(1 << 20))
    for _ in range(3):
        process = subprocess.Popen([sys.executable, "-c", WRITERS, str(path)], stdout=subprocess.PIPE)
        handle = ProcessHandle.open(process.pid, host_id())
        assert handle is not None
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        assert handle.kill()
        select.select([handle], [], [], 20)
        assert not handle.alive()
        then = path.read_bytes()
        process.communicate()
        assert path.read_bytes() == then
        handle.close()
