"""Peers' processes: death is proven, silence is fenced, one's own pauses are nobody's silence."""

import asyncio
import os
import signal
import subprocess
from collections.abc import AsyncIterator, Iterator

import pytest

from twostroke.errors import Unavailable
from twostroke.kvtransfer.process import ProcessHandle, host_id
from twostroke.services.handover.liveness import Liveness, PeerWatch
from twostroke.services.identity import ProcessIdentity


class Clock:
    """Time that only tests move."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    child = subprocess.Popen(["sleep", "300"])
    yield child
    child.kill()
    child.wait()


@pytest.fixture
async def liveness() -> AsyncIterator[Liveness]:
    made = Liveness(host_id(), silence_s=0.3)
    yield made
    made.close()


def identity(pid: int, host: str | None = None) -> ProcessIdentity:
    return ProcessIdentity(5, "peer", pid, host_id() if host is None else host)


class Watched:
    """A watch with its events."""

    def __init__(self, liveness: Liveness, who: ProcessIdentity) -> None:
        self.dead = asyncio.Event()
        self.silent = asyncio.Event()
        handle = liveness.open(who)
        self.watch: PeerWatch = liveness.watch(who, handle, on_dead=self.dead.set, on_silent=self.silent.set)


async def test_death_is_proven(liveness: Liveness, process: subprocess.Popen[bytes]) -> None:
    watched = Watched(liveness, identity(process.pid))
    assert watched.watch.provable
    process.kill()
    await watched.dead.wait()
    assert watched.watch.dead
    assert not watched.silent.is_set()


async def test_a_silent_peer_is_killed_and_its_death_proven(
    liveness: Liveness, process: subprocess.Popen[bytes]
) -> None:
    process.send_signal(signal.SIGSTOP)
    watched = Watched(liveness, identity(process.pid))
    await watched.dead.wait()
    assert process.wait() == -signal.SIGKILL


async def test_a_peer_that_is_heard_lives(liveness: Liveness, process: subprocess.Popen[bytes]) -> None:
    watched = Watched(liveness, identity(process.pid))
    for _ in range(12):
        await asyncio.sleep(0.05)
        watched.watch.heard()
    assert process.poll() is None
    assert not watched.dead.is_set()


async def test_a_watch_that_was_closed_kills_nobody(liveness: Liveness, process: subprocess.Popen[bytes]) -> None:
    watched = Watched(liveness, identity(process.pid))
    watched.watch.close()
    watched.watch.close()
    await asyncio.sleep(0.5)
    assert process.poll() is None
    process.kill()
    process.wait()
    await asyncio.sleep(0.05)
    assert not watched.dead.is_set()


async def test_another_hosts_peer_is_only_told_to_be_silent(
    liveness: Liveness, process: subprocess.Popen[bytes]
) -> None:
    watched = Watched(liveness, identity(process.pid, "elsewhere/1"))
    assert not watched.watch.provable
    await watched.silent.wait()
    assert process.poll() is None


async def test_a_peer_that_may_not_be_killed_is_told_to_be_silent_again_and_again(
    liveness: Liveness, process: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(self: ProcessHandle) -> bool:
        raise PermissionError

    monkeypatch.setattr(ProcessHandle, "kill", refused)
    watched = Watched(liveness, identity(process.pid))
    for _ in range(2):
        async with asyncio.timeout(20):
            await watched.silent.wait()
        watched.silent.clear()
    assert process.poll() is None


async def test_one_never_kills_oneself_or_ones_parent(liveness: Liveness) -> None:
    for pid in (os.getpid(), os.getppid()):
        watched = Watched(liveness, identity(pid))
        await watched.silent.wait()
        watched.watch.close()


async def test_a_process_that_is_gone_is_no_peer(liveness: Liveness, process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    with pytest.raises(Unavailable, match="no longer there"):
        liveness.open(identity(process.pid))


async def test_a_peer_that_died_during_the_handshake_is_dead_at_once(
    liveness: Liveness, process: subprocess.Popen[bytes]
) -> None:
    handle = liveness.open(identity(process.pid))
    process.kill()
    process.wait()
    dead = asyncio.Event()
    liveness.watch(identity(process.pid), handle, on_dead=dead.set, on_silent=lambda: None)
    await dead.wait()


async def test_time_in_which_we_were_stopped_does_not_count(process: subprocess.Popen[bytes]) -> None:
    """Both were frozen together (a whole process group, a container): what the peer sent may be still unread."""
    clock = Clock()
    liveness = Liveness(host_id(), silence_s=10.0, clock=clock)
    watched = Watched(liveness, identity(process.pid))
    try:
        watched.watch.sweep(10.0, 0.0)
        clock.now += 60.0
        watched.watch.sweep(10.0, 59.0)  # 1 s of silence
        clock.now += 8.9
        watched.watch.sweep(10.0, 0.0)
        assert process.poll() is None
        clock.now += 0.2
        watched.watch.sweep(10.0, 0.0)
        await watched.dead.wait()
    finally:
        liveness.close()


async def test_a_late_sweep_is_taken_for_such_time(process: subprocess.Popen[bytes]) -> None:
    clock = Clock()
    liveness = Liveness(host_id(), silence_s=0.2, clock=clock)
    watched = Watched(liveness, identity(process.pid))
    try:
        clock.now += 60.0  # as if stopped: the next sweep comes 60 s late
        await asyncio.sleep(0.1)
        assert process.poll() is None
        assert not watched.dead.is_set()
        for _ in range(20):  # and from then on time passes as the sweeps expect
            clock.now += 0.02
            await asyncio.sleep(0.02)
        await watched.dead.wait()
    finally:
        liveness.close()
