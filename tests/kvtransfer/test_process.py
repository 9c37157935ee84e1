"""Handles on processes."""

import asyncio
import os
import subprocess
import sys

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
