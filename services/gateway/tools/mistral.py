"""Mistral: [TOOL_CALLS] and an array of calls; from tokenizer 11 on, [TOOL_CALLS]name{...} for each call."""

import re
from typing import ClassVar

from .array_parser import SPACE, ArrayParser
from .events import Arguments, CallBegun, CallEnded, Event
from .json_scanner import Fed, JsonScanner, Malformed, demand

BEGIN, ID, ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
MAX_NAME = 256  # characters, with the id
_NAME = re.compile(r"\s*([A-Za-z0-9_.-]+)\s*(\[CALL_ID\][A-Za-z0-9_-]*\s*)?(\[ARGS\]\s*)?")


class _ArgumentsReader:
    """An object by itself."""

    def __init__(self) -> None:
        self._scanner = JsonScanner()

    @property
    def in_string(self) -> bool:
        return self._scanner.in_string

    def skip(self, run: str, told: list[Event]) -> None:
        told.append(Arguments(run))

    def feed(self, character: str, told: list[Event]) -> bool:
        whole = self._scanner.feed(character) is Fed.WHOLE
        told += [Arguments(character), CallEnded()] if whole else [Arguments(character)]
        return whole


class MistralParser(ArrayParser):
    """Both forms, told apart by what follows the marker."""

    markers: ClassVar[tuple[str, ...]] = (BEGIN,)

    def _begin(self, marker: str) -> None:
        self._head = ""
        self._step = self._read_head

    def _read_head(self, character: str) -> None:
        """What stands between the marker and the call."""
        if not self._head.strip() and character == "[":
            self._read(character, lambda _: None)
            self._step = self._read_element
        elif self._head.strip() and character == "{":
            self._arguments = _ArgumentsReader()
            self._step = self._read_arguments
            self._read(character, self._begin_arguments)
        else:
            self._head += character
            self._read(character, self._check_head)

    def _check_head(self, character: str) -> None:
        demand(len(self._head) <= MAX_NAME)
        demand(character in SPACE or bool(self._head.strip()) or character.isalnum() or character in "_-")

    def _begin_arguments(self, character: str) -> None:
        match = _NAME.fullmatch(self._head)
        if match is None:
            raise Malformed
        self._tell([CallBegun(match[1])])
        self._feed_arguments(character)

    def _read_arguments(self, character: str) -> None:
        self._read(character, self._feed_arguments)

    def _feed_arguments(self, character: str) -> None:
        if self._feed(self._arguments, character):
            self._go(self._read_text)
