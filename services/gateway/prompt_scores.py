"""Collects the log-probabilities of a prompt, which come in stretches, some perhaps twice."""

from array import array

from ...engine.request import PromptLogprobs


class PromptScores:
    """Of one request, over all its attempts. Eight bytes an entry."""

    def __init__(self, prompt_tokens: int | None) -> None:
        """`prompt_tokens`: all but the first are waited for; None: nothing is."""
        self._end = 1 if prompt_tokens is None else prompt_tokens
        self._wanted = prompt_tokens is not None
        self.complete = self._end <= 1  # nothing is waited for (any more)
        self._counts = array("I")
        self._ids = array("I")
        self._values = array("f")

    def add(self, stretch: PromptLogprobs) -> None:
        """Takes what is new and joins on; a stretch after a gap is dropped, as its worker will be asked again."""
        skip = 1 + len(self._counts) - stretch.first_position
        if skip < 0:
            return
        counts = stretch.counts[skip : skip + self._end - 1 - len(self._counts)]
        start = sum(stretch.counts[:skip])
        end = start + sum(counts)
        self._counts.extend(counts)
        self._ids.extend(stretch.ids[start:end])
        self._values.extend(stretch.values[start:end])
        self.complete = 1 + len(self._counts) >= self._end

    def take(self) -> PromptLogprobs | None:
        """All of them, once; None where they were not asked for, or are taken."""
        if not self._wanted:
            return None
        self._wanted = False
        return PromptLogprobs(1, self._counts, self._ids, self._values)
