"""Llama 4, ToolACE and others: [name(argument=value, ...), ...], a list of Python's calls as the whole answer."""

import ast
import json
import re
from typing import Any, ClassVar

from .events import Arguments, CallBegun, CallEnded, Event
from .json_scanner import MAX_DEPTH, Malformed, demand
from .tool_parser import ToolParser

MAX_CHARACTERS = 1 << 14
_HEAD = re.compile(r"\[\s*([A-Za-z_]\w*(\.\w*)*\s*)?", re.ASCII)
_OPEN, _CLOSE = "([{", ")]}"


class PythonicParser(ToolParser):
    """Nothing is told before the list is whole: its arguments are no JSON, and are made so. Names must be known."""

    markers: ClassVar[tuple[str, ...]] = ("<|python_start|>", "<|python_tag|>")
    opening: ClassVar[str] = "["

    def _begin(self, marker: str) -> None:
        self._list, self._depth = "", 0
        self._quote, self._escaped = "", False  # the string under way
        self._step = self._read_list

    def _read_list(self, character: str) -> None:
        self._read(character, self._feed_list)

    def _feed_list(self, character: str) -> None:
        if not self._list and character.isspace():
            return
        demand(bool(self._list) or character == "[")
        self._list += character
        demand(len(self._list) <= MAX_CHARACTERS)
        if self._depth == 1 and not self._quote and character not in "(,])":
            demand("(" in self._list or _HEAD.fullmatch(self._list) is not None)
        self._follow(character)
        if self._depth == 0:
            self._tell(_calls(self._list, self._names))
            self._go(self._read_text)

    def _follow(self, character: str) -> None:
        if self._quote:
            if self._escaped:
                self._escaped = False
            elif character == "\\":
                self._escaped = True
            elif character == self._quote:
                self._quote = ""
        elif character in "\"'":
            self._quote = character
        elif character in _OPEN:
            self._depth += 1
            demand(self._depth <= MAX_DEPTH)
        elif character in _CLOSE:
            self._depth -= 1


def _calls(text: str, names: frozenset[str]) -> list[Event]:
    """Malformed where it is no list of calls with values for arguments."""
    told: list[Event] = []
    try:
        tree = ast.parse(text, mode="eval").body
        demand(isinstance(tree, ast.List) and bool(tree.elts))
        for node in tree.elts if isinstance(tree, ast.List) else ():
            told += _call(node, names)
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
        raise Malformed from None
    return told


def _call(node: ast.expr, names: frozenset[str]) -> list[Event]:
    if not isinstance(node, ast.Call) or node.args:
        raise Malformed
    name = ast.unparse(node.func)
    demand(name in names)
    arguments: dict[str, Any] = {}
    for keyword in node.keywords:
        if keyword.arg is None:
            raise Malformed
        arguments[keyword.arg] = ast.literal_eval(keyword.value)
    return [CallBegun(name), Arguments(json.dumps(arguments, ensure_ascii=False, allow_nan=False)), CallEnded()]
