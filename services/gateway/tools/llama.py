"""Llama 3.1 and 3.2: {"name": ..., "parameters": {...}} as the whole answer, after <|python_tag|> or without it."""

from typing import ClassVar

from .json_call import JsonCall
from .json_scanner import demand
from .tool_parser import ToolParser

TAG = "<|python_tag|>"


class LlamaParser(ToolParser):
    """At the beginning, or after the tag; more calls may follow, with or without `;` between them. Only a name that
    there is makes it a call: people ask for JSON, too."""

    markers: ClassVar[tuple[str, ...]] = (TAG,)
    opening: ClassVar[str] = "{"

    def _begin(self, marker: str) -> None:
        self._step = self._read_gap

    def _read_gap(self, character: str) -> None:
        """Before a call."""
        if character == "{":
            self._call = JsonCall(self._names)
            self._step = self._read_call
            self._step(character)
        else:
            self._read(character, self._feed_gap)

    def _feed_gap(self, character: str) -> None:
        demand(character.isspace() or character == ";")

    def _read_call(self, character: str) -> None:
        self._read(character, self._feed_call)

    def _feed_call(self, character: str) -> None:
        if self._feed(self._call, character):
            self._go(self._read_gap)
