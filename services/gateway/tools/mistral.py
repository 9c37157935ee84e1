"""Mistral: [TOOL_CALLS] and an array of calls; from tokenizer 11 on, [TOOL_CALLS]name{...} for each call."""

import re
from typing import ClassVar

from .array_parser import SPACE, ArrayParser
from .events import Arguments, CallBegun, CallEnded, Event
from .json_scanner import Fed, JsonScanner, demand

BEGIN, ID, ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
MAX_NAME = 256  # characters, with the id
_NAME = re.compile(r"\s*([A-Za-z0-9_.-]+)\s*(\[CALL_ID\][A-Za-z0-9_-]*\s*)?(\[ARGS\]\s*)?")


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
            self._scanner = JsonScanner()
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
        demand(match is not None)
        self._tell([CallBegun(match[1] if match is not None else "")])
        self._feed_arguments(character)

    def _read_arguments(self, character: str) -> None:
        self._read(character, self._feed_arguments)

    def _feed_arguments(self, character: str) -> None:
        fed = self._scanner.feed(character)
        told: list[Event] = [Arguments(character)]
        if fed is Fed.WHOLE:
            told.append(CallEnded())
        self._tell(told)
        if fed is Fed.WHOLE:
            self._go(self._read_text)
