"""The supervisor over real processes: order of stopping, restarts, hung ones, and that nothing outlives it."""

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from twostroke.services.supervisor import child as child_module
from twostroke.services.supervisor.child import Child, ChildSpec, backoff_s
from twostroke.services.supervisor.machine import free_ports
from twostroke.services.supervisor.supervisor import Supervisor

STAND_IN = Path(__file__).parent.with_name("stand_in.py")


class Recorder:
    """Keeps the events; `seen` waits for one."""

    def __init__(self) -> None:
        self.events: list[dict[str, object]] = []
        self._news = asyncio.Condition()
        self._tasks: set[asyncio.Task[None]] = set()

    def event(self, event: str, **details: object) -> None:
        self.events.append({"event": event, **details})
        task = asyncio.get_running_loop().create_task(self._wake())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _wake(self) -> None:
        async with self._news:
            self._news.notify_all()

    def of(self, event: str, name: str | None = None) -> list[dict[str, object]]:
        return [e for e in self.events if e["event"] == event and name in (None, e.get("name"))]

    async def seen(self, event: str, name: str | None = None, times: int = 1) -> dict[str, object]:
        async with self._news:
            await asyncio.wait_for(self._news.wait_for(lambda: len(self.of(event, name)) >= times), 20)
        return self.of(event, name)[times - 1]


class Bench:
    """Makes specs of stand-ins and cleans up after them."""

    def __init__(self, folder: Path) -> None:
        self.journal = folder / "journal"
        self.report = Recorder()
        self.ports = iter(free_ports(8))

    def spec(self, name: str, fault: str = "", **limits: float) -> ChildSpec:
        address = f"127.0.0.1:{next(self.ports)}"
        words = (sys.executable, str(STAND_IN), address, str(self.journal), name, fault)
        return ChildSpec(name, words, address, dict(os.environ), **{"drain_s": 5.0, **limits})

    def supervisor(self, gateway: ChildSpec, *workers: ChildSpec) -> Supervisor:
        return Supervisor.of(gateway, workers, self.report)

    def lines(self) -> list[tuple[str, str]]:
        return [(name, what) for name, what, _ in map(str.split, self.journal.read_text().splitlines())]

    def pids(self) -> set[int]:
        return (
            {int(line.split()[2]) for line in self.journal.read_text().splitlines()} if self.journal.exists() else set()
        )


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    made = Bench(tmp_path)
    yield made
    left = [pid for pid in made.pids() if psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie"]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left, "processes outlived their supervisor"


async def test_serves_and_stops_the_gateway_first(bench: Bench) -> None:
    supervisor = bench.supervisor(bench.spec("gateway"), bench.spec("prefill-0"), bench.spec("decode-0"))
    running = asyncio.create_task(supervisor.run())
    serving = await bench.report.seen("serving")
    assert serving["address"] == supervisor.gateway.spec.address
    assert [p["name"] for p in serving["processes"]] == ["prefill-0", "decode-0", "gateway"]  # type: ignore[attr-defined]
    os.kill(os.getpid(), signal.SIGTERM)  # the real way in
    assert await asyncio.wait_for(running, 20) == 0
    lines = bench.lines()
    assert lines.index(("gateway", "ended")) < lines.index(("prefill-0", "terminated"))
    assert lines.index(("gateway", "ended")) < lines.index(("decode-0", "terminated"))
    assert sorted(name for name, what in lines if what == "ended") == ["decode-0", "gateway", "prefill-0"]
    assert [e["event"] for e in bench.report.events[-4:]] == ["exited", "exited", "exited", "stopped"]
    assert [e["code"] for e in bench.report.of("exited")] == [0, 0, 0]


async def test_a_killed_child_comes_back_at_the_same_address(bench: Bench) -> None:
    supervisor = bench.supervisor(bench.spec("gateway"), bench.spec("decode-0"))
    running = asyncio.create_task(supervisor.run())
    await bench.report.seen("serving")
    victim = supervisor.workers[0]
    address, first = victim.spec.address, victim.pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    again = await bench.report.seen("ready", "decode-0", times=2)
    assert again["address"] == address
    assert victim.pid != first
    assert victim.ready.is_set()
    assert bench.report.of("exited", "decode-0")[0]["code"] == -signal.SIGKILL
    assert bench.report.of("restarting", "decode-0")[0]["delay_s"] == 0
    assert len(bench.report.of("started", "gateway")) == 1
    supervisor.stop()
    assert await asyncio.wait_for(running, 20) == 0


async def test_a_frozen_child_is_killed_and_started_again(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_module, "CHECK_S", 0.2)
    supervisor = bench.supervisor(bench.spec("gateway"), bench.spec("prefill-0", silence_s=0.6))
    running = asyncio.create_task(supervisor.run())
    await bench.report.seen("serving")
    frozen = supervisor.workers[0].pid
    assert frozen is not None
    os.kill(frozen, signal.SIGSTOP)
    hung = await bench.report.seen("hung", "prefill-0")
    assert (hung["pid"], hung["reason"]) == (frozen, "silent for 0.6 s")
    await bench.report.seen("ready", "prefill-0", times=2)
    assert bench.report.of("exited", "prefill-0")[0]["code"] == -signal.SIGKILL
    assert not bench.report.of("hung", "gateway")
    supervisor.stop()
    assert await asyncio.wait_for(running, 20) == 0


async def test_one_that_never_gets_ready_is_killed_and_given_up(bench: Bench) -> None:
    supervisor = bench.supervisor(bench.spec("gateway"), bench.spec("decode-0", "never", ready_s=1.0))
    code = await asyncio.wait_for(supervisor.run(), 40)
    assert code != 0
    assert len(bench.report.of("hung", "decode-0")) == child_module.MAX_FAILED_STARTS
    assert bench.report.of("gave_up")[0]["name"] == "decode-0"
    assert not bench.report.of("serving")


async def test_a_wrong_setting_ends_everything_at_once(bench: Bench) -> None:
    supervisor = bench.supervisor(bench.spec("gateway"), bench.spec("decode-0", "exit=2"))
    assert await asyncio.wait_for(supervisor.run(), 20) == 2
    assert len(bench.report.of("started", "decode-0")) == 1
    assert bench.report.of("gave_up")[0]["code"] == 2
    assert len(bench.report.of("exited", "gateway")) == 1


async def test_one_that_cannot_start_is_tried_a_few_times(bench: Bench) -> None:
    supervisor = bench.supervisor(bench.spec("gateway"), bench.spec("decode-0", "exit=7"))
    assert await asyncio.wait_for(supervisor.run(), 20) == 7
    assert len(bench.report.of("started", "decode-0")) == child_module.MAX_FAILED_STARTS


async def test_one_that_was_ready_is_never_given_up(bench: Bench) -> None:
    supervisor = bench.supervisor(bench.spec("gateway", "die"), bench.spec("decode-0"))
    running = asyncio.create_task(supervisor.run())
    await bench.report.seen("ready", "gateway", times=2)
    for _ in range(child_module.MAX_FAILED_STARTS):
        starts = supervisor.gateway.starts
        os.kill(supervisor.gateway.pid or 0, signal.SIGKILL)
        await bench.report.seen("started", "gateway", times=starts + 1)
    await bench.report.seen("ready", "gateway", times=3)
    delays = [e["delay_s"] for e in bench.report.of("restarting", "gateway")]
    assert delays == [backoff_s(failures) for failures in range(1, 5)]
    supervisor.stop()
    assert await asyncio.wait_for(running, 20) == 0


async def test_a_second_signal_kills(bench: Bench) -> None:
    supervisor = bench.supervisor(bench.spec("gateway", "deaf", drain_s=60), bench.spec("decode-0"))
    running = asyncio.create_task(supervisor.run())
    await bench.report.seen("serving")
    supervisor.stop()
    await bench.report.seen("draining")
    assert not running.done()
    supervisor.stop()
    await asyncio.wait_for(running, 20)
    assert {e["code"] for e in bench.report.of("exited")} == {-signal.SIGKILL}


def kill_and_wait(pid: int) -> None:
    """Until it is dead, with the loop standing still, so that asyncio has not heard of it."""
    os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(psutil.NoSuchProcess):
        while psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.01)


async def test_a_signal_to_one_that_just_ended_leaves_its_exit_code(bench: Bench) -> None:
    """Whoever waits for it gets it, whatever is signalled in between."""
    child = Child(bench.spec("decode-0"), bench.report)
    running = asyncio.create_task(child.run())
    await bench.report.seen("ready")
    assert child.pid is not None
    kill_and_wait(child.pid)
    child.kill()
    await asyncio.wait_for(running, 20)
    assert [e["code"] for e in bench.report.of("exited")] == [-signal.SIGKILL]


async def test_one_that_does_not_drain_is_killed(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_module, "KILL_GRACE_S", 0.1)
    supervisor = bench.supervisor(bench.spec("gateway", "deaf", drain_s=0.2), bench.spec("decode-0"))
    running = asyncio.create_task(supervisor.run())
    await bench.report.seen("serving")
    supervisor.stop()
    assert await asyncio.wait_for(running, 20) == 0
    assert bench.report.of("exited", "gateway")[0]["code"] == -signal.SIGKILL
    assert bench.report.of("exited", "decode-0")[0]["code"] == 0


async def test_stop_before_anything_is_ready(bench: Bench) -> None:
    supervisor = bench.supervisor(bench.spec("gateway"), bench.spec("decode-0", "never"))
    running = asyncio.create_task(supervisor.run())
    await bench.report.seen("started", "gateway")
    supervisor.stop()
    await asyncio.wait_for(running, 20)
    assert len(bench.report.of("started")) == 2


async def test_cancelling_the_supervisor_leaves_no_process(bench: Bench) -> None:
    running = asyncio.create_task(bench.supervisor(bench.spec("gateway"), bench.spec("decode-0")).run())
    await bench.report.seen("serving")
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    deadline = time.monotonic() + 10
    while any(psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" for pid in bench.pids()):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


async def test_a_program_that_is_not_there(bench: Bench) -> None:
    spec = ChildSpec("gateway", ("/does/not/exist",), "127.0.0.1:1", {})
    with pytest.raises(FileNotFoundError):
        await Child(spec, bench.report).run()


async def test_a_process_that_ends_for_a_successor_is_followed_at_once(bench: Bench) -> None:
    """Such an end is no failure, however often it comes; the successor may name the first one again."""
    first, second = bench.spec("w", "exit=71"), bench.spec("w", "exit=72")
    last = bench.spec("w", "")
    spec = replace(first, successors={71: second.arguments, 72: last.arguments}, address=last.address)
    child = Child(spec, bench.report)
    running = asyncio.create_task(child.run())
    await bench.report.seen("ready", "w")
    assert [event["delay_s"] for event in bench.report.of("restarting")] == [0.0, 0.0]
    assert child.starts == 3
    await child.stop()
    assert await running is None


def test_backoff() -> None:
    assert [backoff_s(n) for n in range(9)] == [0, 0, 0.5, 1, 2, 4, 8, 10, 10]
    assert backoff_s(10**6) == 10
