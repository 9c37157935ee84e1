"""One supervised process: started, watched, started again when it dies or hangs."""

import asyncio
import contextlib
import math
import os
import signal
import time
from asyncio.subprocess import Process
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from ..grpc_setup import OpenChannel, open_channel
from .health import Condition, HealthProbe

CHECK_S = 1.0  # between two health checks, and the most that one may take
STARTING_CHECK_S = 0.2  # the same until it is ready: somebody waits
SETTLED_S = 30.0  # a process that was ready for so long starts anew without delay
MAX_BACKOFF_S = 10.0
MAX_FAILED_STARTS = 3  # without having been ready even once
USAGE_ERROR = 2  # exit code of a wrong setting: no restart mends it
KILL_GRACE_S = 5.0  # beyond the drain


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """What to run. It serves gRPC health on `address` (host:port), of which it is told by its arguments."""

    name: str
    arguments: tuple[str, ...]
    address: str
    environment: Mapping[str, str]
    silence_s: float = 10.0  # without an answer after it was ready: killed
    ready_s: float = 600.0  # without having become ready: killed
    drain_s: float = 30.0  # after SIGTERM, and some grace: killed
    successors: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    """By exit code: the arguments to go on with. Such an end is no failure."""
    http_url: str = ""  # where it serves HTTP, if it does
    admin_address: str = ""  # where it takes orders, if not at `address`
    health_address: str = ""  # where it serves health besides, if `address` is not for us
    watch_address: str = ""  # where it tells of its health instead, if not to whoever asks one of those two
    channel: OpenChannel = open_channel  # to where it is asked
    descriptors: tuple[int, ...] = ()  # files that it inherits


class Report(Protocol):
    """Is told what happens. `event`: started, ready, exited, hung, restarting or gave_up."""

    def event(self, event: str, **details: object) -> None:
        """Must return at once."""


@dataclass
class Child:
    """Runs `spec` until told to stop."""

    spec: ChildSpec
    report: Report
    ready: asyncio.Event = field(default_factory=asyncio.Event)  # it serves now
    starts: int = 0
    _process: Process | None = None
    _handle: int | None = None  # a pidfd of it
    _stopping: asyncio.Event = field(default_factory=asyncio.Event)
    _ready_for: float = 0.0  # how long the last process had been ready when it ended

    @property
    def pid(self) -> int | None:
        """Of the process that runs now."""
        return self._process.pid if self._process is not None else None

    async def run(self) -> int | None:
        """Returns None once stopped, or an exit code when starting it again is no use."""
        failures = 0
        ever_ready = False
        while not self._stopping.is_set():
            code = await self._run_once()
            ever_ready = ever_ready or self._ready_for > 0
            if self._stopping.is_set():
                break
            if code in self.spec.successors:
                self.spec = replace(self.spec, arguments=self.spec.successors[code])
                self.report.event("restarting", name=self.spec.name, delay_s=0.0)
                continue
            failures = 0 if self._ready_for >= SETTLED_S else failures + 1
            if not ever_ready and (code == USAGE_ERROR or failures >= MAX_FAILED_STARTS):
                self.report.event("gave_up", name=self.spec.name, code=code)
                return code if code > 0 else 1
            delay = backoff_s(failures)
            self.report.event("restarting", name=self.spec.name, delay_s=delay)
            await self._stopping_within(delay)
        return None

    def hurry(self) -> None:
        """SIGTERM again, to one that `stop` waits for."""
        if self._stopping.is_set():
            self._signal(signal.SIGTERM)

    async def stop(self) -> None:
        """SIGTERM, time to drain, SIGKILL; returns when the process is gone and no other will come."""
        self._stopping.set()
        process = self._process
        if process is None:
            return
        self._signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(process.wait(), self.spec.drain_s + KILL_GRACE_S)
        except TimeoutError:
            self.kill()
            await process.wait()

    def kill(self) -> None:
        """SIGKILL, now, and no restart."""
        self._stopping.set()
        self._signal(signal.SIGKILL)

    async def _run_once(self) -> int:
        """One process from start to end; its exit code, negative for a signal."""
        self._ready_for = 0.0
        self.starts += 1
        process = await asyncio.create_subprocess_exec(
            *self.spec.arguments,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=2,  # ours is for the answer; everything that children say goes to the log
            env=dict(self.spec.environment),
            pass_fds=self.spec.descriptors,
            start_new_session=True,  # Ctrl-C in the terminal reaches the supervisor alone, which knows the order
        )
        self._process = process
        with contextlib.suppress(ProcessLookupError):  # it is gone already
            self._handle = os.pidfd_open(process.pid)
        self.report.event("started", name=self.spec.name, pid=process.pid, address=self.spec.address)
        if self._stopping.is_set():  # told while the process was being made
            self._signal(signal.SIGKILL)
        watch = asyncio.create_task(self._watch(), name=f"watch {self.spec.name}")
        try:
            code = await process.wait()
        finally:
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)
            self.ready.clear()
            self._signal(signal.SIGKILL)  # where the supervisor itself is being cancelled
            if self._handle is not None:
                os.close(self._handle)
            self._process = self._handle = None
        self.report.event("exited", name=self.spec.name, pid=process.pid, code=code)
        return code

    async def _watch(self) -> None:
        """A health check each second; kills a process that never gets ready, or falls silent after it was."""
        spec = self.spec
        probe = HealthProbe(spec.watch_address or spec.health_address or spec.address, spec.channel)
        started = time.monotonic()
        ready_at = 0.0
        silent = 0
        try:
            while True:
                begun = time.monotonic()
                condition = await probe.check(CHECK_S)
                now = time.monotonic()
                if condition is Condition.SERVING and not ready_at:
                    ready_at = now
                    self.report.event("ready", name=self.spec.name, address=self.spec.address, after_s=now - started)
                self._note(condition, now - ready_at if ready_at else 0.0)
                silent = silent + 1 if condition is Condition.SILENT else 0
                # counted in checks, not seconds: this process may itself have been frozen
                if ready_at and silent > math.ceil(self.spec.silence_s / CHECK_S):
                    return self._hung(f"silent for {self.spec.silence_s:g} s")
                if not ready_at and now - started > self.spec.ready_s:
                    return self._hung(f"not ready after {self.spec.ready_s:g} s")
                pause = CHECK_S if ready_at else STARTING_CHECK_S
                await asyncio.sleep(max(0.0, begun + pause - time.monotonic()))
        finally:
            await probe.close()

    def _note(self, condition: Condition, ready_for: float) -> None:
        if condition is Condition.SERVING:
            self._ready_for = max(ready_for, 1e-3)
            self.ready.set()
        else:
            self.ready.clear()

    def _hung(self, why: str) -> None:
        self.report.event("hung", name=self.spec.name, pid=self.pid, reason=why)
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        """To the process that runs now, if any. By its pidfd, so that no stranger gets it; and asyncio's own way would
        take the exit code of one that just ended away from whoever waits for it."""
        if self._handle is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._handle, number)

    async def _stopping_within(self, seconds: float) -> None:
        try:
            await asyncio.wait_for(self._stopping.wait(), seconds)
        except TimeoutError:
            return


def backoff_s(failures: int) -> float:
    """Delay before the next start after so many deaths in a row: none, then 0.5 s, 1, 2, ... up to 10."""
    return 0.0 if failures <= 1 else min(MAX_BACKOFF_S, 0.25 * 2.0 ** min(failures - 1, 16))
