"""Pages of a prefill worker that copies under way still read."""

import logging
from collections.abc import Iterable

from ...engine.block_pool import BlockPool
from ...errors import TwostrokeError
from ...kvtransfer.messages import Copy

log = logging.getLogger(__name__)


class SourceHolds:
    """Keeps them out of use, whatever becomes of their sequence. On the engine's thread.

    The copies of one stretch of pages, a layer each, share a hold: to count page by page costs as much as to copy.
    """

    def __init__(self, pool: BlockPool) -> None:
        """`pool`: the engine's."""
        self._pool = pool
        self._names: dict[int, tuple[str, int, int, tuple[int, ...]]] = {}  # by copy
        self._under_way: dict[tuple[str, int, int, tuple[int, ...]], int] = {}  # copies by name

    def __len__(self) -> int:
        """Copies under way."""
        return len(self._names)

    def begin(self, copy: Copy) -> None:
        """This copy is under way; its pages are owned."""
        name = ("copy", copy.reader, copy.ticket, copy.src)
        count = self._under_way.get(name, 0)
        if not count:
            try:
                self._pool.hold(name, copy.src)
            except TwostrokeError:  # a fault of ours; the copy is launched, and its ticket will not come to its end
                log.exception("pages are read that nobody owns")
        self._names[copy.copy] = name
        self._under_way[name] = count + 1

    def end(self, copies: Iterable[int]) -> None:
        """They read no more."""
        for copy in copies:
            if (name := self._names.pop(copy, None)) is None:
                continue
            self._under_way[name] -= 1
            if not self._under_way[name]:
                del self._under_way[name]
                self._pool.unhold(name)
