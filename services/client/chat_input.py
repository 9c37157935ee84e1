"""What a user types in a chat, line by line: messages of one or more lines, and commands."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

MAX_MESSAGE = 4 << 20  # characters
QUOTES = '"""'


class Command(Enum):
    """What is no message."""

    EXIT = "/exit"
    RESET = "/reset"
    SYSTEM = "/system"
    HELP = "/help"
    UNKNOWN = ""


@dataclass(frozen=True, slots=True)
class Entry:
    """A message, or a command with the text behind it."""

    text: str
    command: Command | None = None


def read_entry(read_line: Callable[[bool], str | None]) -> Entry | None:
    r"""The next message or command; None where the input ends. Empty lines are skipped.

    A line that ends with `\` goes on in the next one. A line that begins with `\"\"\"` begins a text that ends at the
    next `\"\"\"` at a line's end, and is taken as it is. `//` begins a message that begins with `/`.

    `read_line(more)`: a line without its newline, or None at the end; `more`: it continues a message. ValueError for a
    message that is too long.
    """
    while (line := read_line(False)) is not None:
        _grown(0, line)
        if line.lstrip().startswith(QUOTES):
            text = _quoted(line.lstrip().removeprefix(QUOTES), read_line)
            if text.strip():
                return Entry(text)
        elif (text := _joined(line, read_line)).strip():
            return _entry(text)
    return None


def _entry(text: str) -> Entry:
    if not text.startswith("/"):
        return Entry(text)
    if text.startswith("//"):
        return Entry(text[1:])
    word, _, rest = text.partition(" ")
    try:
        return Entry(rest.strip(), Command(word.strip()))
    except ValueError:
        return Entry(word.strip(), Command.UNKNOWN)


def _joined(line: str, read_line: Callable[[bool], str | None]) -> str:
    lines = []
    size = len(line)
    while line.endswith("\\"):
        lines.append(line[:-1])
        following = read_line(True)
        if following is None:
            return "\n".join(lines)
        line = following
        size = _grown(size, line)
    return "\n".join([*lines, line])


def _quoted(line: str, read_line: Callable[[bool], str | None]) -> str:
    lines = []
    size = len(line)
    while not line.rstrip().endswith(QUOTES):
        lines.append(line)
        following = read_line(True)
        if following is None:
            return "\n".join(lines).strip("\n")
        line = following
        size = _grown(size, line)
    return "\n".join([*lines, line.rstrip().removesuffix(QUOTES)]).strip("\n")


def _grown(size: int, line: str) -> int:
    if size + len(line) > MAX_MESSAGE:
        raise ValueError(f"a message has at most {MAX_MESSAGE} characters")
    return size + len(line) + 1
