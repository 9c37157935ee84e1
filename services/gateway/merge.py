"""Makes one stream of the two that prefill and decode worker send: each output index once, in order."""

from collections.abc import Sequence

from ...engine.request import FinishReason, Token


class Merger:
    """Takes whichever copy of a token comes first; messages may be repeated, late or out of order."""

    def __init__(self, max_tokens: int, first_index: int = 0) -> None:
        """`max_tokens`: indices from there on are dropped, so that what is kept is bounded, and the output ends there.

        `first_index`: where a replay goes on.
        """
        self._next = first_index
        self._max = max_tokens
        self._early: dict[int, Token] = {}  # by index; beyond a gap
        self._end: int | None = None
        self._reason: FinishReason | None = None

    @property
    def next_index(self) -> int:
        """Index of the next token to come out; so many came out so far."""
        return self._next

    @property
    def finish(self) -> FinishReason | None:
        """Why the output ended, once all of its tokens came out; whatever the workers say, it ends at `max_tokens`."""
        if self._next == self._end:
            return self._reason
        return FinishReason.LENGTH if self._next >= self._max else None

    def accept(self, first_index: int, tokens: Sequence[Token], finish: FinishReason | None) -> list[Token]:
        """The tokens that are new and without a gap now. `finish`: the output ends after the last of `tokens`."""
        end = first_index + len(tokens)
        if first_index == self._next and finish is None and self._end is None and not self._early and end <= self._max:
            self._next = end
            return list(tokens)
        if finish is not None and self._end is None:
            self._end, self._reason = max(self._next, min(end, self._max)), finish
            self._early = {index: token for index, token in self._early.items() if index < self._end}
        limit = self._max if self._end is None else self._end
        for index, token in enumerate(tokens, first_index):
            if self._next <= index < limit:
                self._early.setdefault(index, token)
        fresh: list[Token] = []
        while (following := self._early.pop(self._next, None)) is not None:
            fresh.append(following)
            self._next += 1
        return fresh
