"""Pieces of Lark: strings of Python as a model may write them, what matches just one text, lists, choices."""

import json
from collections.abc import Iterable

COMMA = "/, ?/"
_CHARACTER = r"""[^{quote}\\\x00-\x1f]|\\["'\\nrtbf]|\\u([0-9a-ce-fA-CE-F][0-9a-fA-F]{{3}}|[dD][0-7][0-9a-fA-F]{{2}})"""


def string(least: int = 0, most: int | None = None) -> str:
    """The pattern of a string of so many characters, in either kind of quotes."""
    times = f"{{{least},{'' if most is None else most}}}" if least or most is not None else "*"
    return "|".join(f"{quote}({_CHARACTER.format(quote=quote)}){times}{quote}" for quote in "\"'")


def lark(text: str) -> str:
    """A text as Lark has it."""
    return json.dumps(text)


def pattern(text: str) -> str:
    """An expression that a text alone matches."""
    return "".join(each if each.isalnum() or not each.isascii() else f"\\x{ord(each):02x}" for each in text)


def quoted(text: str) -> str:
    """A string in either kind of quotes."""
    inner = "".join(_escape(each) for each in text.replace("\\", "\\\\"))
    return " | ".join(lark(quote + inner.replace(quote, "\\" + quote) + quote) for quote in "\"'")


def _escape(character: str) -> str:
    """Only what no line of a program can hold."""
    if character >= " " and not 0xD800 <= ord(character) < 0xE000:
        return character
    return {"\n": "\\n", "\r": "\\r", "\t": "\\t"}.get(character) or f"\\u{ord(character):04x}"


def listed(first: list[str], rest: str | None, least: int, most: int) -> str:
    """From `least` to `most` of them, with commas between them."""
    after, count = "", len(first)
    if rest is not None and most > count:
        low, high = max(least - count, 0), most - count
        if not count:
            many = f"{rest} {_more(rest, max(low - 1, 0), high - 1)}"
            return many if low else f"({many})?"
        after = _more(rest, low, high)
    for index in range(count - 1, 0, -1):
        after = f"{COMMA} {first[index]} {after}" if index < least else f"({COMMA} {first[index]} {after})?"
    whole = f"{first[0]} {after}" if first else ""
    return f"({whole})?" if whole and not least else whole


def _more(item: str, low: int, high: int) -> str:
    return f"({COMMA} {item}){{{low},{high}}}" if high else ""


def any_of(ways: Iterable[str | None]) -> str | None:
    """Of the ways that there are; None where there is none."""
    told = list(dict.fromkeys(way for way in ways if way is not None))
    return None if not told else told[0] if len(told) == 1 else f"({' | '.join(told)})"
