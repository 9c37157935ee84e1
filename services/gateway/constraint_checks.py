"""Whether constraints can be used, found out beside the loop: bounded in time, memory, and how many wait."""

import asyncio
import hashlib
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

from ...engine.constraint_text import check_text
from ...engine.request import Constraint
from ...errors import ConfigError, InvalidRequest, Overloaded
from .grammar_process import COMPILE_S, GrammarProcess

PROCESSES = 2
KEPT = 1024  # verdicts
MAX_WAITING = 256  # constraints that nobody has looked at yet
WAIT_S = 20.0  # most that one of these waits


@dataclass(slots=True, eq=False)
class _Check:
    task: "asyncio.Task[str]"
    waiting: int = 0  # requests
    begun: bool = False


class ConstraintChecks:
    """One loop owns it. What was found out once is kept, so that a repeated schema costs nothing."""

    def __init__(
        self, folder: Path | None, *, processes: int = PROCESSES, compile_s: float = COMPILE_S, wait_s: float = WAIT_S
    ) -> None:
        """`folder`: the model's; None: only the texts are checked."""
        self._idle = [GrammarProcess(folder, compile_s=compile_s) for _ in range(processes)] if folder else []
        self._free = asyncio.Semaphore(processes)
        self._wait_s = wait_s
        self._checked = folder is not None
        self._verdicts: OrderedDict[bytes, str] = OrderedDict()
        self._running: dict[bytes, _Check] = {}

    async def check(self, constraint: Constraint | None) -> None:
        """InvalidRequest, with the field, where it cannot be used; Overloaded where too many want to know."""
        if constraint is None:
            return
        field = field_of(constraint)
        try:
            check_text(constraint)
        except InvalidRequest as error:
            raise InvalidRequest(error.message, field=field) from None
        if self._checked and (verdict := await self._verdict(constraint)):
            raise InvalidRequest(verdict, field=field)

    async def stop(self) -> None:
        """Ends what runs, and the processes."""
        tasks = [check.task for check in self._running.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for process in self._idle:
            await process.kill()

    async def _verdict(self, constraint: Constraint) -> str:
        """Requests with the same constraint wait for one check; one that nobody waits for any more is not begun."""
        key = hashlib.sha256(b"%d " % constraint.kind + constraint.text.encode()).digest()
        verdict = self._verdicts.get(key)
        if verdict is not None:
            self._verdicts.move_to_end(key)
            return verdict
        check = self._running.get(key)
        if check is None:
            check = self._begin(key, constraint)
        check.waiting += 1
        try:
            return await asyncio.shield(check.task)
        finally:
            check.waiting -= 1
            if not check.waiting and not check.begun:
                check.task.cancel()

    def _begin(self, key: bytes, constraint: Constraint) -> _Check:
        if sum(not check.begun for check in self._running.values()) >= MAX_WAITING:
            raise Overloaded("too many constraints wait to be checked", retry_after_s=self._wait_s)
        check = self._running[key] = _Check(asyncio.create_task(self._find_out(key, constraint)))
        check.task.add_done_callback(lambda task: self._ended(key, task))
        return check

    def _ended(self, key: bytes, task: "asyncio.Task[str]") -> None:
        del self._running[key]
        if not task.cancelled():
            task.exception()  # seen, though nobody may wait for it any more

    async def _find_out(self, key: bytes, constraint: Constraint) -> str:
        try:
            async with asyncio.timeout(self._wait_s):
                await self._free.acquire()
        except TimeoutError:
            raise Overloaded("too many constraints wait to be checked", retry_after_s=self._wait_s) from None
        process = self._idle.pop()
        try:
            self._running[key].begun = True
            verdict = await process.verdict(constraint)
        except ConfigError as error:
            verdict = error.message
        finally:
            self._idle.append(process)
            self._free.release()
        self._verdicts[key] = verdict
        if len(self._verdicts) > KEPT:
            self._verdicts.popitem(last=False)
        return verdict


def field_of(constraint: Constraint) -> str:
    """What the native API calls it."""
    return f"sampling.constraint.{constraint.kind.name.lower()}"
