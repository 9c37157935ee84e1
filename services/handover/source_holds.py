"""Pages of a prefill worker that copies under way still read."""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ...engine.block_pool import BlockPool
from ...errors import TwostrokeError
from ...kvtransfer.messages import Copy

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Hold:
    name: tuple[str, int, int, tuple[int, ...]]
    copies: int = 0  # under way


class SourceHolds:
    """Keeps them out of use, whatever becomes of their sequence. On the engine's thread.

    The copies of one stretch of pages, a layer each, share a hold: to count page by page costs as much as to copy.
    """

    def __init__(self, pool: BlockPool) -> None:
        """`pool`: the engine's."""
        self._pool = pool
        self._holds: dict[tuple[str, int, int, tuple[int, ...]], _Hold] = {}  # by name
        self._by_copy: dict[int, _Hold] = {}

    def __len__(self) -> int:
        """Copies under way."""
        return len(self._by_copy)

    def begin(self, copies: Sequence[Copy]) -> None:
        """These copies of the same pages are under way; the pages are owned."""
        if not copies:
            return
        first = copies[0]
        name = ("copy", first.reader, first.ticket, first.src)
        hold = self._holds.get(name)
        if hold is None:
            hold = self._holds[name] = _Hold(name)
            try:
                self._pool.hold(name, first.src)
            except TwostrokeError:  # a fault of ours; the copy is launched, and its ticket will not come to its end
                log.exception("pages are read that nobody owns")
        hold.copies += len(copies)
        self._by_copy.update(dict.fromkeys((copy.copy for copy in copies), hold))

    def end(self, copies: Iterable[int]) -> None:
        """They read no more."""
        for copy in copies:
            hold = self._by_copy.pop(copy, None)
            if hold is None:
                continue
            hold.copies -= 1
            if not hold.copies:
                del self._holds[hold.name]
                self._pool.unhold(hold.name)
