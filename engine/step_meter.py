"""How long prompts and decode steps take on this engine. No torch.

A step that has both is slowed by its prompt tokens; what they cost is the step's time less that of one which only
decodes. So whoever chooses where a prompt is computed knows what it costs here, and what it costs those who decode.
"""

HORIZON = 64  # decode steps after which one counts for 1/e
HEAD_START_S = 0.002  # for the host to launch a step before the one ahead of it ends, and for that to be a little early


class StepMeter:
    """Told of each step that was computed; seconds."""

    def __init__(self) -> None:
        self.prompt_seconds = 0.0  # that prompt tokens took, since the start
        self.decode_step = 0.0  # seconds of a step that only decodes, a mean over recent ones; 0: none was seen
        self._decode_steps = 0
        self._last_decode = 0.0  # seconds of the last such step
        self._ended = 0.0

    def note(self, began: float, ended: float, prompt_tokens: int, decode_rows: int) -> None:
        """A step is computed. `began`: when it was launched; it ran once the step before it had `ended`."""
        seconds = ended - max(began, self._ended)
        self._ended = ended
        if not prompt_tokens:
            self._last_decode = seconds
            self._decode_steps = min(self._decode_steps + 1, HORIZON)
            self.decode_step += (seconds - self.decode_step) / self._decode_steps
        elif not decode_rows:
            self.prompt_seconds += seconds
        else:  # at least their share by number: the mean may be of fuller steps than this one
            share = seconds * prompt_tokens / (prompt_tokens + decode_rows)
            self.prompt_seconds += max(share, seconds - self.decode_step)

    def due(self, began: float) -> float:
        """When to launch what follows a step that only decodes, launched when the clock said `began`: so that the
        device goes from one to the other, though not much sooner.
        """
        return max(began, self._ended) + min(self.decode_step, self._last_decode) - HEAD_START_S
