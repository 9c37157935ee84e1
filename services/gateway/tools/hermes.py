"""Hermes, Qwen 2.5 and 3, and many more: <tool_call>{"name": ..., "arguments": {...}}</tool_call>."""

from typing import ClassVar

from .json_call import JsonCall
from .json_scanner import demand
from .tool_parser import ToolParser

BEGIN, END = "<tool_call>", "</tool_call>"


class HermesParser(ToolParser):
    """Any name is a call's: the markers leave no doubt. The end mark may be missing."""

    markers: ClassVar[tuple[str, ...]] = (BEGIN,)

    def _begin(self, marker: str) -> None:
        self._call = JsonCall()
        self._step = self._read_call

    def _read_call(self, character: str) -> None:
        self._read(character, self._feed_call)

    def _feed_call(self, character: str) -> None:
        if self._feed(self._call, character):
            self._end = ""
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
