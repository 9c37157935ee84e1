"""Once an engine is idle, its books are checked: every page free or cached, no ticket left."""

import logging
from collections.abc import Callable

from ...engine.core import EngineCore
from ..handover.handover import Handover

log = logging.getLogger(__name__)

CHECK_S = 5.0  # it runs no more often than this,
QUIET_S = 1.0  # not before the engine has been idle for so long,
SHARE = 100  # and takes no more than one part in so many: it costs O(pages), and a request may come meanwhile


class IdleCheck:
    """On the engine's thread. A fault is logged; with `strict` it is raised."""

    def __init__(
        self, core: EngineCore, handover: Handover, clock: Callable[[], float], *, check_s: float, strict: bool
    ) -> None:
        """`check_s`: seconds from one check to the next, 0: whenever it is idle. `clock`: monotonic seconds."""
        self._core = core
        self._handover = handover
        self._clock = clock
        self._check_s = check_s
        self._strict = strict
        self._touched: float | None = None  # when something last happened; None: nothing since the last check
        self._next = 0.0

    def touch(self) -> None:
        """Something happened."""
        self._touched = self._clock()

    def run_if_due(self) -> None:
        """The engine has no sequence and no held page now."""
        now = self._clock()
        if self._touched is None or now < max(self._next, self._touched + min(QUIET_S, self._check_s)):
            return
        try:
            self._core.check_integrity(idle=True)
            self._handover.check(idle=True)
        except Exception:
            if self._strict:
                raise
            log.exception("the idle engine's books are wrong")
        self._touched = None
        after = self._clock()
        self._next = after + max(self._check_s, SHARE * (after - now) if self._check_s else 0.0)
