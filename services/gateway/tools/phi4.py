"""Phi-4-mini: functools[...] or <|tool_call|>[...]<|/tool_call|>, with calls inside."""

from typing import ClassVar

from .array_parser import ArrayParser

BEGIN, END, WORD = "<|tool_call|>", "<|/tool_call|>", "functools["


class Phi4Parser(ArrayParser):
    """Both forms."""

    markers: ClassVar[tuple[str, ...]] = (BEGIN, WORD)
    end: ClassVar[str] = END

    def _begin(self, marker: str) -> None:
        self._step = self._read_element if marker == WORD else self._read_open
