"""Follows JSON as it comes, a character at a time, and says at once what can be none."""

import re
from enum import Enum

MAX_DEPTH = 64
PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
"""Of a string, what neither ends nor changes it."""
_SPACE = " \t\n\r"
_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?", re.ASCII)
_NUMBER_CHARACTERS = frozenset("0123456789+-.eE")
_LITERALS = {"t": "rue", "f": "alse", "n": "ull"}
_ESCAPES = frozenset('"\\/bfnrt')
_HEX = frozenset("0123456789abcdefABCDEF")


class Malformed(Exception):
    """This is no JSON, or not what is called for. It stays inside: the text is for people then."""


class Fed(Enum):
    """What became of a value with a character."""

    MORE = 1
    WHOLE = 2  # this was its last character
    BEFORE = 3  # it had ended before: numbers have no end of their own


class _At(Enum):
    VALUE = 1
    FIRST_ITEM = 2
    FIRST_KEY = 3
    KEY = 4
    COLON = 5
    AFTER = 6
    STRING = 7
    ESCAPE = 8
    HEX = 9
    LITERAL = 10
    NUMBER = 11


class JsonScanner:
    """One value of RFC 8259, without the space around it. Keeps no text but that of a number."""

    def __init__(self) -> None:
        self._open: list[str] = []  # brackets
        self._at = _At.VALUE
        self._is_key = False  # the string under way
        self._rest = ""  # of a literal; of a number, what there is
        self._digits = 0  # of \u, to come

    @property
    def in_string(self) -> bool:
        """Characters of PLAIN change nothing now: they need not be fed."""
        return self._at is _At.STRING

    def feed(self, character: str) -> Fed:
        """Malformed where it cannot follow."""
        match self._at:
            case _At.STRING:
                return self._in_string(character)
            case _At.ESCAPE:
                return self._escaped(character)
            case _At.HEX:
                return self._hex(character)
            case _At.LITERAL:
                return self._in_literal(character)
            case _At.NUMBER:
                return self._in_number(character)
        if character in _SPACE:
            if not self._open:
                raise Malformed
            return Fed.MORE
        match self._at:
            case _At.COLON:
                demand(character == ":")
                self._at = _At.VALUE
                return Fed.MORE
            case _At.AFTER:
                return self._after(character)
        return self._begin(character)

    def _begin(self, character: str) -> Fed:
        if (self._at is _At.FIRST_ITEM and character == "]") or (self._at is _At.FIRST_KEY and character == "}"):
            return self._close()
        if self._at in (_At.KEY, _At.FIRST_KEY):
            demand(character == '"')
            self._at, self._is_key = _At.STRING, True
        elif character == '"':
            self._at, self._is_key = _At.STRING, False
        elif character in "{[":
            demand(len(self._open) < MAX_DEPTH)
            self._open.append(character)
            self._at = _At.FIRST_KEY if character == "{" else _At.FIRST_ITEM
        elif character in _LITERALS:
            self._at, self._rest = _At.LITERAL, _LITERALS[character]
        else:
            demand(character == "-" or (character.isascii() and character.isdigit()))
            self._at, self._rest = _At.NUMBER, character
        return Fed.MORE

    def _after(self, character: str) -> Fed:
        inside = self._open[-1]
        if character == ",":
            self._at = _At.KEY if inside == "{" else _At.VALUE
            return Fed.MORE
        demand(character == ("}" if inside == "{" else "]"))
        return self._close()

    def _close(self) -> Fed:
        self._open.pop()
        return self._ended()

    def _ended(self) -> Fed:
        self._at = _At.AFTER
        return Fed.MORE if self._open else Fed.WHOLE

    def _in_string(self, character: str) -> Fed:
        if character == '"':
            if self._is_key:
                self._at = _At.COLON
                return Fed.MORE
            return self._ended()
        demand(character >= " ")
        if character == "\\":
            self._at = _At.ESCAPE
        return Fed.MORE

    def _escaped(self, character: str) -> Fed:
        if character == "u":
            self._at, self._digits = _At.HEX, 4
            return Fed.MORE
        demand(character in _ESCAPES)
        self._at = _At.STRING
        return Fed.MORE

    def _hex(self, character: str) -> Fed:
        demand(character in _HEX)
        self._digits -= 1
        if self._digits == 0:
            self._at = _At.STRING
        return Fed.MORE

    def _in_literal(self, character: str) -> Fed:
        demand(character == self._rest[0])
        self._rest = self._rest[1:]
        return Fed.MORE if self._rest else self._ended()

    def _in_number(self, character: str) -> Fed:
        if character in _NUMBER_CHARACTERS:
            self._rest += character
            return Fed.MORE
        demand(_NUMBER.fullmatch(self._rest) is not None)
        self._at = _At.AFTER
        if not self._open:
            return Fed.BEFORE
        return Fed.MORE if character in _SPACE else self._after(character)


def demand(holds: bool) -> None:
    """Malformed unless it holds."""
    if not holds:
        raise Malformed
