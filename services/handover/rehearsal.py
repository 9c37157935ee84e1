"""What an idle decode worker does while the KV of a prompt comes: it goes the ways that it will go once it is there."""

import logging
import time
from collections.abc import Callable, Sequence
from itertools import cycle

from ...kvtransfer.messages import Progress
from ...kvtransfer.reader import Reader
from .handover import NEAR_S
from .lane import LaneEnd
from .link_events import WriterLinks

log = logging.getLogger(__name__)

EVERY_S = 0.001
_NEVER = float("inf")


class Rehearsal:
    """Code and data that were not used for some milliseconds are in no cache any more: then a launch takes half a
    millisecond, and a fifth of that when one like it has just been made. And to be woken up takes time: so when the end
    of a hand-over is near the engine's thread, whose all of this is, looks for it itself.
    """

    def __init__(
        self,
        reader: Reader,
        links: WriterLinks,
        ways: Sequence[Callable[[], None]],
        *,
        layers: int,
        eager: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`ways`: of a step, of digests, ...; each harmless at any time at which no step is on its way. `eager`: to
        look, and to rehearse again and again; else a step's way is gone once whenever layers have come.
        """
        self.until = 0.0  # so long the thread does not sleep
        self._reader = reader
        self._links = links
        self._ways = ways
        self._turns = cycle(reversed(ways))
        self._layers = layers
        self._eager = eager
        self._clock = clock
        self._next = _NEVER
        self._lane: LaneEnd | None = None  # whose own thread pauses

    def told(self, writer: int, progress: Progress) -> None:
        """By a writer, while there is no step to run. Once the last layers are there the rest comes any moment, and
        must not be held up.
        """
        near = [entry for entry in progress.entries if self._reader.nearly_there(writer, *entry)]
        lane = self._links.lane(writer) if near and self._eager else None
        if lane is not None:
            now = self._clock()
            there = any(layers >= self._layers for _, layers, _ in near)
            self.until, self._next = now + NEAR_S, _NEVER if there else now
            self._lane = lane
            lane.pause(self.until)
        elif any(layers < self._layers for _, layers, _ in progress.entries):
            self._go(self._ways[0])

    def look(self) -> None:
        """For what comes by the lane; then one of the ways, if it is time."""
        if self._lane is not None:
            self._lane.look()
        if self._clock() >= self._next:
            self._next = self._clock() + EVERY_S if self._go(next(self._turns)) else _NEVER

    def sleep(self) -> None:
        """It is there, and a step follows: behind its launch comes `over`."""
        self.until, self._next = 0.0, _NEVER

    def over(self) -> None:
        """Somebody else looks again."""
        self.sleep()
        if self._lane is not None:
            lane, self._lane = self._lane, None
            lane.resume()

    def _go(self, way: Callable[[], None]) -> bool:
        """Whether all went well: what fails here is nobody's step."""
        try:
            way()
        except Exception:
            log.exception("a rehearsal failed")
            return False
        return True
