"""A call as a JSON object: {"name": ..., "arguments": {...}}, its members in any order."""

import json
from enum import Enum
from typing import Any

from pydantic_core import from_json

from .events import Arguments, CallBegun, CallEnded, Event
from .json_scanner import Fed, JsonScanner, Malformed, demand

ARGUMENTS = ("arguments", "parameters")  # what models call them
MAX_HELD = 1 << 16  # characters of a key, a name, or of arguments that come before their name
_SPACE = " \t\n\r"


class _At(Enum):
    OPEN = 1
    FIRST_KEY = 2
    KEY = 3
    COLON = 4
    VALUE = 5
    INSIDE = 6  # a value, or a key
    AFTER = 7


class JsonCall:
    """Begins to tell once it knows the name and has seen the arguments begin; they go out as they come."""

    def __init__(self, names: frozenset[str] | None = None) -> None:
        """`names`: of the functions that there are; an object with another one is no call. None: any name will do."""
        self._names = names
        self._at = _At.OPEN
        self._scanner = JsonScanner()
        self._key: str | None = None  # whose value is under way; None while a key is
        self._raw: list[str] = []  # of the key or value under way, where it is kept
        self._held = 0  # characters in it
        self._seen: set[str] = set()
        self._name: str | None = None
        self._arguments: str | None = None  # that came before the name
        self._object = False  # the value under way is one, and streamed once the name is known
        self.begun = False

    @property
    def in_string(self) -> bool:
        """Whether what `PLAIN` matches may go to `skip`."""
        return self._at is _At.INSIDE and self._scanner.in_string

    def skip(self, run: str, told: list[Event]) -> None:
        """As `feed`, for many characters at once."""
        self._keep(run, told)

    def feed(self, character: str, told: list[Event]) -> bool:
        """Adds to `told`; True with the last character. Malformed where it is none."""
        if self._at is _At.INSIDE:
            return self._inside(character, told)
        if character in _SPACE:
            return False
        match self._at:
            case _At.OPEN:
                demand(character == "{")
                self._at = _At.FIRST_KEY
            case _At.COLON:
                demand(character == ":")
                self._at = _At.VALUE
            case _At.VALUE:
                self._begin_value(character, told)
            case _At.AFTER:
                return self._after(character, told)
            case _:
                if self._at is _At.FIRST_KEY and character == "}":
                    return self._end(told)
                demand(character == '"')
                self._start(None, character)
        return False

    def _start(self, key: str | None, character: str) -> None:
        """A key, or a value, begins."""
        self._key, self._raw, self._scanner, self._at = key, [character], JsonScanner(), _At.INSIDE
        self._object, self._held = False, 1
        self._scanner.feed(character)

    def _begin_value(self, character: str, told: list[Event]) -> None:
        key = self._key or ""
        self._start(key, character)
        self._object = key in ARGUMENTS and character == "{"
        if key in ARGUMENTS:
            demand(character in '{"n')  # an object; one in a text; null
        if key == "name":
            demand(character == '"')
        if self._object and self._name is not None:
            self._begin(told)
            told.append(Arguments(character))

    def _inside(self, character: str, told: list[Event]) -> bool:
        fed = self._scanner.feed(character)
        if fed is not Fed.BEFORE:
            self._keep(character, told)
            if fed is Fed.MORE:
                return False
        if self._key is None:
            self._end_key()
            return False
        self._end_value(told)
        return self._after(character, told) if fed is Fed.BEFORE and character not in _SPACE else False

    def _keep(self, text: str, told: list[Event]) -> None:
        if self._object and self.begun:
            told.append(Arguments(text))
        elif self._key is None or self._key == "name" or self._key in ARGUMENTS:
            self._raw.append(text)
            self._held += len(text)
            demand(self._held <= MAX_HELD)

    def _end_key(self) -> None:
        key = json.loads("".join(self._raw))
        kind = ARGUMENTS[0] if key in ARGUMENTS else key
        demand(kind not in self._seen)
        self._seen.add(kind)
        self._key, self._at = key, _At.COLON

    def _end_value(self, told: list[Event]) -> None:
        self._at = _At.AFTER
        if self._key == "name":
            self._name = json.loads("".join(self._raw))
            demand(bool(self._name) and (self._names is None or self._name in self._names))
        elif self._key in ARGUMENTS and not self.begun:
            self._arguments = _object("".join(self._raw))
        if self._name is not None and self._arguments is not None:
            self._begin(told)
            told.append(Arguments(self._arguments))
            self._arguments = None

    def _after(self, character: str, told: list[Event]) -> bool:
        if character == ",":
            self._at = _At.KEY
            return False
        demand(character == "}")
        return self._end(told)

    def _end(self, told: list[Event]) -> bool:
        demand(self._name is not None)
        if not self.begun:
            self._begin(told)
            told.append(Arguments("{}"))
        told.append(CallEnded())
        return True

    def _begin(self, told: list[Event]) -> None:
        self.begun = True
        told.append(CallBegun(self._name or ""))


def _object(raw: str) -> str:
    """Arguments as an object's text, whatever form they came in."""
    value = _load(raw)
    if isinstance(value, str):  # some models write the object as a text
        raw = value
        value = _load(raw)
    if value is None:
        return "{}"
    demand(isinstance(value, dict))
    return raw


def _load(raw: str) -> Any:
    try:
        return from_json(raw, allow_inf_nan=False)
    except ValueError:
        raise Malformed from None
