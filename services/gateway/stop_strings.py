"""Finds stop strings in text that comes in pieces, and holds back what may become one."""

from collections.abc import Sequence
from typing import NamedTuple


class Scan(NamedTuple):
    """`text` can be sent; `matched` is the stop string that ended it, or None."""

    text: str
    matched: str | None


class StopStrings:
    """Knuth, Morris and Pratt's automaton for each string, run side by side: constant work a character and string.

    The first match to complete wins; of those that complete at the same character, the longest. So the result does not
    depend on how the text was cut.
    """

    def __init__(self, strings: Sequence[str], *, include: bool = False) -> None:
        """`strings`: none of them empty. `include`: the match is sent too."""
        self._strings = tuple(strings)
        self._include = include
        self._tables = [failure_table(string) for string in self._strings]
        self._states = [0] * len(self._strings)  # characters of each string that the text so far ends with
        self._held = ""

    def push(self, text: str, *, counts: bool = True) -> Scan:
        """The text that became certain. After a match, nothing more must be pushed.

        `counts` False: strings that end within this text are no matches; one that only begins here can become one.
        """
        if not self._strings:
            return Scan(text, None)
        for position, character in enumerate(text):
            matched = self._advance(character)
            if matched is not None and counts:
                whole = self._held + text[: position + 1]
                self._held = ""
                return Scan(whole if self._include else whole[: len(whole) - len(matched)], matched)
        whole = self._held + text
        cut = len(whole) - max(self._states)
        self._held = whole[cut:]
        return Scan(whole[:cut], None)

    def flush(self) -> str:
        """What was held back, where the text ended without a match."""
        held, self._held = self._held, ""
        self._states = [0] * len(self._strings)
        return held

    def _advance(self, character: str) -> str | None:
        best: str | None = None
        for index, string in enumerate(self._strings):
            state, table = self._states[index], self._tables[index]
            while state and string[state] != character:
                state = table[state - 1]
            if string[state] == character:
                state += 1
            if state == len(string):
                state = table[state - 1]
                best = string if best is None or len(string) > len(best) else best
            self._states[index] = state
        return best


def failure_table(string: str) -> list[int]:
    """For each prefix, the length of its longest proper suffix that is a prefix too."""
    table = [0] * len(string)
    state = 0
    for index in range(1, len(string)):
        while state and string[state] != string[index]:
            state = table[state - 1]
        if string[state] == string[index]:
            state += 1
        table[index] = state
    return table
