"""Whether constraints can be used, found out beside the loop: bounded in time, memory, and how many wait."""

import asyncio
import hashlib
from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path

from ...engine.constraint_text import check_text
from ...engine.request import Constraint
from ...errors import ConfigError, InvalidRequest, Overloaded
from .grammar_process import COMPILE_S, GrammarProcess
from .turns_of_tenants import TenantTurns

PROCESSES = 2
KEPT = 1024  # verdicts
MAX_WAITING = 64  # constraints of a tenant that nobody has looked at yet
WAIT_S = 20.0  # most that one of these waits


@dataclass(slots=True, eq=False)
class _Check:
    """One constraint; requests that have the same wait for it together."""

    key: bytes
    task: "asyncio.Task[str]" = field(init=False)
    waiting: int = 0  # requests
    begun: bool = False


class ConstraintChecks:
    """One loop owns it. What was found out once is kept, so that a repeated schema costs nothing."""

    def __init__(
        self, folder: Path | None, *, processes: int = PROCESSES, compile_s: float = COMPILE_S, wait_s: float = WAIT_S
    ) -> None:
        """`folder`: the model's; None: only the texts are checked."""
        self._idle = [GrammarProcess(folder, compile_s=compile_s) for _ in range(processes)] if folder else []
        self._turns = TenantTurns[asyncio.Future[GrammarProcess]]()
        self._wait_s = wait_s
        self._checked = folder is not None
        self._verdicts: OrderedDict[bytes, str] = OrderedDict()
        self._running: dict[bytes, _Check] = {}

    async def check(self, constraint: Constraint | None, tenant: str = "") -> None:
        """InvalidRequest, with the field, where it cannot be used; Overloaded where too many want to know.

        A tenant waits for what is being compiled, and for its own; not for what others have waiting.
        """
        if constraint is None:
            return
        field = field_of(constraint)
        try:
            check_text(constraint)
        except InvalidRequest as error:
            raise InvalidRequest(error.message, field=field) from None
        if self._checked and (verdict := await self._verdict(constraint, tenant)):
            raise InvalidRequest(verdict, field=field)

    async def stop(self) -> None:
        """Ends what runs, and the processes."""
        tasks = [check.task for check in self._running.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for process in self._idle:
            await process.kill()

    async def _verdict(self, constraint: Constraint, tenant: str) -> str:
        """One that nobody waits for any more is not begun."""
        key = hashlib.sha256(b"%d " % constraint.kind + constraint.text.encode()).digest()
        verdict = self._verdicts.get(key)
        if verdict is not None:
            self._verdicts.move_to_end(key)
            return verdict
        check = self._running.get(key)
        if check is None:
            check = self._begin(key, constraint, tenant)
        check.waiting += 1
        try:
            return await asyncio.shield(check.task)
        finally:
            check.waiting -= 1
            if not check.waiting and not check.begun:
                self._forget(check)  # whoever comes now begins anew
                check.task.cancel()

    def _begin(self, key: bytes, constraint: Constraint, tenant: str) -> _Check:
        if self._turns.waiting(tenant) >= MAX_WAITING:
            raise _too_many(self._wait_s)
        check = self._running[key] = _Check(key)
        check.task = asyncio.create_task(self._find_out(check, constraint, tenant))
        check.task.add_done_callback(lambda task: self._ended(check, task))
        return check

    def _forget(self, check: _Check) -> None:
        if self._running.get(check.key) is check:
            del self._running[check.key]

    def _ended(self, check: _Check, task: "asyncio.Task[str]") -> None:
        self._forget(check)
        if not task.cancelled():
            task.exception()  # seen, though nobody may wait for it any more

    async def _find_out(self, check: _Check, constraint: Constraint, tenant: str) -> str:
        process = await self._take(tenant)
        try:
            check.begun = True
            verdict = await process.verdict(constraint)
        except ConfigError as error:
            verdict = error.message
        finally:
            self._give_back(process)
        self._verdicts[check.key] = verdict
        if len(self._verdicts) > KEPT:
            self._verdicts.popitem(last=False)
        return verdict

    async def _take(self, tenant: str) -> GrammarProcess:
        """A process, when it is this tenant's turn."""
        if self._idle:
            return self._idle.pop()
        turn: asyncio.Future[GrammarProcess] = asyncio.get_running_loop().create_future()
        self._turns.add(tenant, turn)
        try:
            await asyncio.wait((turn,), timeout=self._wait_s)
            if turn.done():
                return turn.result()
        except BaseException:
            if turn.done():  # it got one in this very moment
                self._give_back(turn.result())
            raise
        finally:
            self._turns.remove(tenant, turn)
        raise _too_many(self._wait_s)

    def _give_back(self, process: GrammarProcess) -> None:
        turn = self._turns.pop()
        if turn is None:
            self._idle.append(process)
        else:
            turn.set_result(process)


def _too_many(wait_s: float) -> Overloaded:
    return Overloaded("too many constraints wait to be checked", retry_after_s=wait_s)


def field_of(constraint: Constraint) -> str:
    """What the native API calls it."""
    return f"sampling.constraint.{constraint.kind.name.lower()}"
