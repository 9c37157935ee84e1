"""Calls as JSON behind a marker, one object or an array of them: what several formats share."""

from typing import ClassVar

from .json_call import JsonCall
from .json_scanner import demand
from .tool_parser import ToolParser

SPACE = " \t\n\r"


class ArrayParser(ToolParser):
    """Any name is a call's: the markers leave no doubt. The end mark may be missing."""

    end: ClassVar[str] = ""
    """Comes behind; empty: nothing does."""

    def _begin(self, marker: str) -> None:
        self._step = self._read_open

    def _read_open(self, character: str) -> None:
        """An object, or an array."""
        self._in_array = character == "["
        if character == "{":
            self._begin_call(character)
        else:
            self._read(character, self._feed_open)

    def _feed_open(self, character: str) -> None:
        demand(character in SPACE or character == "[")
        if character == "[":
            self._step = self._read_element

    def _read_element(self, character: str) -> None:
        """In an array, before an object."""
        self._in_array = True
        if character == "{":
            self._begin_call(character)
        else:
            self._read(character, self._feed_gap)

    def _feed_gap(self, character: str) -> None:
        demand(character in SPACE)

    def _begin_call(self, character: str) -> None:
        self._call = JsonCall()
        self._step = self._read_call
        self._step(character)

    def _read_call(self, character: str) -> None:
        self._read(character, self._feed_call)

    def _feed_call(self, character: str) -> None:
        if self._feed(self._call, character):
            if self._in_array:
                self._go(self._read_after)
            else:
                self._close()

    def _read_after(self, character: str) -> None:
        self._read(character, self._feed_after)

    def _feed_after(self, character: str) -> None:
        if character == ",":
            self._step = self._read_element
        elif character == "]":
            self._close()
        else:
            demand(character in SPACE)

    def _close(self) -> None:
        self._tail = ""
        self._go(self._read_end if self.end else self._read_text)

    def _read_end(self, character: str) -> None:
        self._read(character, self._feed_end)

    def _feed_end(self, character: str) -> None:
        if not self._tail and character.isspace():
            return
        self._tail += character
        demand(self.end.startswith(self._tail))
        if self._tail == self.end:
            self._go(self._read_text)
