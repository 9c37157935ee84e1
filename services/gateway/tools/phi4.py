"""Phi-4-mini: functools[...] or <|tool_call|>[...]<|/tool_call|>, with an array of calls inside."""

from typing import ClassVar

from .array_parser import SPACE, ArrayParser
from .json_scanner import demand

BEGIN, END, WORD = "<|tool_call|>", "<|/tool_call|>", "functools["


class Phi4Parser(ArrayParser):
    """Both forms. The end mark may be missing."""

    markers: ClassVar[tuple[str, ...]] = (BEGIN, WORD)

    def _begin(self, marker: str) -> None:
        self._end = ""
        self._step = self._read_element if marker == WORD else self._read_open

    def _read_open(self, character: str) -> None:
        self._read(character, self._open_array)

    def _open_array(self, character: str) -> None:
        demand(character in SPACE or character == "[")
        if character == "[":
            self._step = self._read_element

    def _closed(self) -> None:
        self._go(self._read_end)

    def _read_end(self, character: str) -> None:
        self._read(character, self._feed_end)

    def _feed_end(self, character: str) -> None:
        if not self._end and character.isspace():
            return
        self._end += character
        demand(END.startswith(self._end))
        if self._end == END:
            self._go(self._read_text)
