"""Runs a set of processes until told to stop: workers and the gateway before them."""

import asyncio
import signal
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from .child import Child, ChildSpec, Report


@dataclass
class Supervisor:
    """Starts everything at once; stops the gateway first, so that running answers still have their workers."""

    gateway: Child
    workers: Sequence[Child]
    report: Report
    joined: Callable[[], Awaitable[None]] | None = None  # returns when the gateway has met its workers
    _stop: asyncio.Event = field(default_factory=asyncio.Event)
    _killed: bool = False

    @classmethod
    def of(
        cls,
        gateway: ChildSpec,
        workers: Sequence[ChildSpec],
        report: Report,
        joined: Callable[[], Awaitable[None]] | None = None,
    ) -> "Supervisor":
        """A supervisor of these, nothing started yet."""
        return cls(Child(gateway, report), [Child(spec, report) for spec in workers], report, joined)

    @property
    def children(self) -> list[Child]:
        """All of them, the gateway last."""
        return [*self.workers, self.gateway]

    async def run(self) -> int:
        """Until a signal, or until a child cannot be started; the exit code. No child outlives it."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self.stop)
        running = [asyncio.create_task(child.run(), name=child.spec.name) for child in self.children]
        announce = asyncio.create_task(self._announce(), name="announce")
        stop = asyncio.create_task(self._stop.wait(), name="stop")
        try:
            await asyncio.wait([*running, stop], return_when=asyncio.FIRST_COMPLETED)
            announce.cancel()
            self.report.event("draining")
            await self._stop_children()
            codes = await asyncio.gather(*running)
        finally:
            for task in (*running, announce, stop):
                task.cancel()
            await asyncio.gather(*running, announce, stop, return_exceptions=True)
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)
        code = next((code for code in codes if code), 0)
        self.report.event("stopped", code=code)
        return code

    def stop(self) -> None:
        """Once: drains. A second time: kills."""
        if not self._stop.is_set():
            self._stop.set()
        elif not self._killed:
            self._killed = True
            self.report.event("killing")
            for child in self.children:
                child.kill()

    async def _stop_children(self) -> None:
        await self.gateway.stop()
        await asyncio.gather(*(worker.stop() for worker in self.workers))

    async def _announce(self) -> None:
        await asyncio.gather(*(child.ready.wait() for child in self.children))
        if self.joined is not None:
            await self.joined()
        self.report.event(
            "serving",
            address=self.gateway.spec.address,
            admin=self.gateway.spec.admin_address or self.gateway.spec.address,
            http=self.gateway.spec.http_url,
            processes=[
                {"name": child.spec.name, "pid": child.pid, "address": child.spec.address} for child in self.children
            ],
        )
