"""Steps that failed: each is told to the log, too many in a row end the engine."""

import logging

from ...engine.request import StepResult
from ...errors import TwostrokeError

log = logging.getLogger(__name__)

MOST_IN_A_ROW = 16  # a request that fails every step it is in, and its replays, are fewer


class StepFaults:
    """On the engine's thread.

    A device that is lost for good fails every step, and quickly: a worker that went on would look idle, draw all
    requests and fail them.
    """

    def __init__(self) -> None:
        """None yet."""
        self._in_a_row = 0

    def note(self, result: StepResult) -> None:
        """What `EngineCore.step` returned, untouched. Raises TwostrokeError when no step works any more."""
        if result.outputs:
            self._in_a_row = 0
        if not result.failures:
            return
        _, error = result.failures[0]  # the runner's, the same for all sequences of the step
        log.error("a step failed with %d sequences: %r", len(result.failures), error, exc_info=error)
        self._in_a_row += 1
        if self._in_a_row >= MOST_IN_A_ROW:
            raise TwostrokeError(f"{self._in_a_row} steps in a row failed, the last one by {error!r}") from error
