"""Llama 4, ToolACE and others: [name(argument=value, ...), ...], a list of Python's calls as the whole answer."""

import ast
import json
import warnings
from collections.abc import Callable
from typing import Any, ClassVar

from .events import Arguments, CallBegun, CallEnded, Event
from .json_scanner import MAX_DEPTH, Malformed, demand
from .tool_parser import ToolParser

MAX_CHARACTERS = 1 << 16
BEGIN, END = "<|python_start|>", "<|python_end|>"
TAG = "<|python_tag|>"
NOT_IN_NAMES = frozenset("=,()[]{}'\"#\\\n\r")
"""Characters that no argument's name has: they would end it, or begin something else."""
_OPEN, _CLOSE = "([{", ")]}"


class PythonicParser(ToolParser):
    """Nothing is told before the list is whole: its arguments are no JSON, and are made so. Names must be known."""

    markers: ClassVar[tuple[str, ...]] = (BEGIN, TAG)
    opening: ClassVar[str] = "["

    def _begin(self, marker: str) -> None:
        self._list = _CallList(self._names)
        self._step = self._read_list

    def _read_list(self, character: str) -> None:
        self._read(character, self._feed_list)

    def _feed_list(self, character: str) -> None:
        if self._list.feed(character):
            self._tell(self._list.told)
            self._go(self._read_text)


class _CallList:
    """Follows the list a character at a time. Of an argument's name only those characters are wrong that would end it:
    a schema may call it `from`, or `start-date`, and models write it so."""

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names
        self._step: Callable[[str], None] = self._begin
        self._text: list[str] = []  # of a name or a value
        self._characters = 0
        self._argument = ""
        self._arguments: dict[str, Any] = {}
        self._depth = 0  # within a value
        self._quote, self._escaped = "", False  # the string under way
        self._whole = False
        self.told: list[Event] = []

    def feed(self, character: str) -> bool:
        """True with the last character. Malformed where it cannot follow."""
        self._characters += 1
        demand(self._characters <= MAX_CHARACTERS)
        self._step(character)
        return self._whole

    def _begin(self, character: str) -> None:
        if not character.isspace():
            demand(character == "[")
            self._step = self._in_name

    def _in_name(self, character: str) -> None:
        """Of a function."""
        name = "".join(self._text)
        if character == "(":
            name = name.rstrip()
            demand(name in self._names)
            self.told.append(CallBegun(name))
            self._arguments = {}
            self._start(self._in_argument)
        elif character == "]":  # after a last comma
            demand(not name and bool(self.told))
            self._whole = True
        elif name or not character.isspace():
            self._text.append(character)
            head = (name + character).rstrip()
            demand(any(known.startswith(head) for known in self._names))

    def _in_argument(self, character: str) -> None:
        """Its name."""
        if character == "=":
            self._argument = "".join(self._text).strip()
            demand(bool(self._argument))
            self._start(self._in_value)
        elif character == ")":  # after a last comma, or without any
            demand(not "".join(self._text).strip())
            self._end_call()
        else:
            demand(character not in NOT_IN_NAMES or character.isspace())
            self._text.append(character)

    def _in_value(self, character: str) -> None:
        if not self._quote and self._depth == 0 and character in ",)":
            self._arguments[self._argument] = _read_value("".join(self._text))
            self._start(self._in_argument)
            if character == ")":
                self._end_call()
            return
        self._text.append(character)
        if self._quote:
            self._in_string(character)
        elif character in "\"'":
            self._quote = character
        elif character in _OPEN:
            self._depth += 1
            demand(self._depth <= MAX_DEPTH)
        elif character in _CLOSE:
            demand(self._depth > 0)
            self._depth -= 1

    def _in_string(self, character: str) -> None:
        if self._escaped:
            self._escaped = False
        elif character == "\\":
            self._escaped = True
        elif character == self._quote:
            self._quote = ""

    def _end_call(self) -> None:
        self.told += [Arguments(_json(self._arguments)), CallEnded()]
        self._start(self._after_call)

    def _after_call(self, character: str) -> None:
        if character == "]":
            self._whole = True
        elif character == ",":
            self._start(self._in_name)
        else:
            demand(character.isspace())

    def _start(self, step: Callable[[str], None]) -> None:
        self._text, self._step = [], step


def _read_value(text: str) -> Any:
    """Malformed where it is no literal."""
    demand(bool(text) and not text.isspace())
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of '\d', which is read as it stands: an answer's text is not for logs
            return ast.literal_eval(f"({text})")
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
        raise Malformed from None


def _json(arguments: dict[str, Any]) -> str:
    """Malformed where JSON has no such value."""
    try:
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError, RecursionError):
        raise Malformed from None
    # '\ud83d\ude00' is one character to JSON and two halves to Python, which no message can carry
    return text if text.isascii() else text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
