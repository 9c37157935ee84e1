"""Calls as a JSON array of objects behind a marker: what the formats of Mistral and of Phi-4-mini share."""

from abc import abstractmethod

from .json_call import JsonCall
from .json_scanner import demand
from .tool_parser import ToolParser

SPACE = " \t\n\r"


class ArrayParser(ToolParser):
    """Reads from behind `[` on; what is before and after the array is the format's own."""

    def _read_element(self, character: str) -> None:
        if character == "{":
            self._call = JsonCall()
            self._step = self._read_call
            self._step(character)
        else:
            self._read(character, self._feed_gap)

    def _feed_gap(self, character: str) -> None:
        demand(character in SPACE)

    def _read_call(self, character: str) -> None:
        self._read(character, self._feed_call)

    def _feed_call(self, character: str) -> None:
        if self._feed(self._call, character):
            self._go(self._read_after)

    def _read_after(self, character: str) -> None:
        self._read(character, self._feed_after)

    def _feed_after(self, character: str) -> None:
        if character == ",":
            self._step = self._read_element
        elif character == "]":
            self._closed()
        else:
            demand(character in SPACE)

    @abstractmethod
    def _closed(self) -> None:
        """The array is whole: `_go` to what follows."""
