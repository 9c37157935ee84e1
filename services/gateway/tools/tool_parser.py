"""What all parsers of tool calls share: text in pieces in, events out."""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar, Protocol

from .events import CallBegun, CallBroken, CallEnded, Event, Text, joined
from .json_scanner import PLAIN, Malformed

MAX_SPACE = 64  # characters of white space held back, as they are dropped where a call follows


class JsonReader(Protocol):
    """Of a call, or of its arguments."""

    @property
    def in_string(self) -> bool:
        """Whether what `PLAIN` matches may go to `skip`."""

    def feed(self, character: str, told: list[Event]) -> bool:
        """Adds to `told`; True with the last character. Malformed where it is none."""

    def skip(self, run: str, told: list[Event]) -> None:
        """As `feed`, for many characters at once."""


class ToolParser(ABC):
    """Reads an answer character by character, so that its events do not depend on how it was cut.

    Held back is what may yet begin a call. White space around a call is part of it. What turns out to be no call is
    text: the first character that was held goes out, and the rest is read anew.
    """

    markers: ClassVar[tuple[str, ...]] = ()
    """Each begins a call, wherever it stands."""
    opening: ClassVar[str] = ""
    """A character that begins a call as the first one of an answer; empty: none does."""

    def __init__(self, names: frozenset[str]) -> None:
        """`names`: of the functions that there are."""
        self._names = names
        firsts = re.escape("".join({marker[0] for marker in self.markers}))
        self._plain = re.compile(rf"(?:\s{{0,{MAX_SPACE}}}[^\s{firsts}])+")  # where no call can begin
        self._pending, self._at = "", 0  # text to be read, and how much of it was
        self._step: Callable[[str], None] = self._read_start if self.opening else self._read_text
        self._held = ""  # in text: white space, then perhaps the beginning of a marker
        self._raw: list[str] = []  # in a call: all of it, with the space before
        self._told: list[Event] = []
        self._json: JsonReader | None = None  # that is under way
        self._open = False  # a call was begun and has not ended
        self._after_call = False  # nothing but white space since one

    def push(self, text: str) -> list[Event]:
        """The events that became certain with it."""
        self._put_back(text)
        self._run()
        return self._take()

    def flush(self) -> list[Event]:
        """The rest; nothing must be pushed any more."""
        while self._step != self._read_text:
            self._fail("".join(self._raw), "")
            self._run()
        held, self._held = self._held, ""
        self._tell_text(held)
        return self._take()

    @abstractmethod
    def _begin(self, marker: str) -> None:
        """A call may come now: sets `_step` to what reads it. `marker`: empty for `opening`, which is read next."""

    # For the formats

    def _read(self, character: str, step: Callable[[str], None]) -> None:
        """One character of a call (or several that decide nothing), by `step`; Malformed: it is none."""
        self._raw.append(character)
        try:
            step(character)
        except Malformed:
            self._raw.pop()
            self._fail("".join(self._raw), character)

    def _feed(self, call: JsonReader, character: str) -> bool:
        """One character of a JSON object; whether it is whole. Malformed."""
        told: list[Event] = []
        self._json = call
        try:
            return call.feed(character, told)
        finally:
            self._tell(told)

    def _skip(self, run: str) -> None:
        """Characters of a string in a JSON object. Malformed."""
        if self._json is not None:
            told: list[Event] = []
            self._json.skip(run, told)
            self._tell(told)

    def _tell(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, CallBegun):
                self._open = True
            elif isinstance(event, CallEnded):
                self._open, self._after_call = False, True
        self._told += events

    def _go(self, step: Callable[[str], None]) -> None:
        """What was read is settled, whatever comes; `step` reads on."""
        self._raw, self._step, self._json = [], step, None

    # Text

    def _read_start(self, character: str) -> None:
        """Before anything but white space."""
        if character.isspace() and len(self._held) < MAX_SPACE:
            self._held += character
        elif character == self.opening:
            self._enter("")
            self._step(character)
        else:
            held, self._held = self._held, ""
            self._step = self._read_text
            self._put_back(held + character)

    def _read_text(self, character: str) -> None:
        self._held += character
        while self._held and not self._may_begin(self._held):
            self._tell_text(self._held[0])
            self._held = self._held[1:]
        found = self._held.lstrip()
        if found in self.markers:
            self._enter(found)

    def _may_begin(self, held: str) -> bool:
        rest = held.lstrip()
        if len(held) - len(rest) > MAX_SPACE:
            return False
        return not rest or any(marker.startswith(rest) for marker in self.markers)

    def _enter(self, marker: str) -> None:
        self._raw = list(self._held)
        self._held = ""
        self._begin(marker)

    def _fail(self, raw: str, wrong: str) -> None:
        """No call after all. Arguments that are out stay out; what follows them is read anew. `wrong`: the character
        that told, if one did."""
        self._raw, self._step, self._json = [], self._read_text, None
        if self._open:
            self._open = self._after_call = False
            self._told.append(CallBroken(raw))
            raw = ""
        first = len(raw) - len(raw.lstrip()) + 1  # the marker's own, which would begin it again
        self._tell_text(raw[:first])
        self._put_back(raw[first:] + wrong)

    def _tell_text(self, text: str) -> None:
        if self._after_call:
            text = text.lstrip()
        if text:
            self._after_call = False
            self._told.append(Text(text))

    def _put_back(self, text: str) -> None:
        """Text to be read next. (Of new text nothing is pending: all is read each time.)"""
        self._pending, self._at = text + self._pending[self._at :], 0

    def _run(self) -> None:
        while self._at < len(self._pending):
            if not self._run_ahead():
                self._at += 1
                self._step(self._pending[self._at - 1])

    def _run_ahead(self) -> bool:
        """Takes many characters at once, where they decide nothing; whether there were any."""
        take: Callable[[str], None]
        if self._json is not None and self._json.in_string:
            run, take = PLAIN.match(self._pending, self._at), self._read_run
        elif not self._held and self._step == self._read_text:
            run, take = self._plain.match(self._pending, self._at), self._tell_text
        else:
            return False
        if run is None:
            return False
        self._at = run.end()
        take(run[0])
        return True

    def _read_run(self, run: str) -> None:
        self._read(run, self._skip)

    def _take(self) -> list[Event]:
        told, self._told = self._told, []
        return joined(told)
