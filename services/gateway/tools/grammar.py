"""Grammars, in llguidance's Lark, of answers that call functions in a format: what its parser reads."""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from ....errors import InvalidRequest
from . import hermes, mistral, phi4, pythonic
from .pythonic_calls import write_calls
from .wish import Function, ToolWish

Mark: TypeAlias = Callable[[str], int | None]
"""The id of a special token by its name; None: the name is plain text for the model."""

MAX_CALLS = 32  # of an answer
_SPACE = "/[ \\n]?/"
_OPTIONS = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,64}"}  # bounded: some models would never stop


def write_grammar(
    form: str, template: str, wish: ToolWish, mark: Mark, *, answer: Mapping[str, Any] | None = None
) -> str:
    """`form`: a format's name. `template`: the chat template, which tells which of Mistral's forms it is. `answer`: the
    schema of what is said instead of calls, where it must be JSON.

    InvalidRequest (field `tools`) where there is no grammar for it.
    """
    layout = _Layout(wish, mark, json_answer=answer is not None)
    head = _head
    told = [] if answer is None else [f"answer: %json {_with_options(answer, lenient=False)}"]
    match form:
        case "hermes":
            body = f"{_SPACE} call {_SPACE} {_lark(hermes.END, mark)}"
            rules = layout.each(hermes.BEGIN, body, _SPACE)
        case "mistral" if mistral.ARGUMENTS in template:
            rules = layout.each(mistral.BEGIN, "call", "")
            calls = _calls(wish, lambda name: f'"{name}" {_lark(mistral.ARGUMENTS, mark)}', "")
            return "\n".join([*rules, *calls, *told])
        case "mistral":
            rules = layout.together(mistral.BEGIN, f'{_SPACE} "[" calls "]"')
        case "phi4" if phi4.BEGIN in template:
            rules = layout.together(phi4.BEGIN, f'"[" calls "]" {_lark(phi4.END, mark)}')
        case "phi4":
            rules = layout.together(phi4.WORD, 'calls "]"')
        case "llama":
            rules = layout.bare()
            head = _head if wish.required or answer is not None else _whole_head
        case "pythonic":
            rules = layout.listed(pythonic.BEGIN, pythonic.END)
            return "\n".join([*rules, *write_calls(wish, _parameters), *told])
        case _:
            raise InvalidRequest(f"calls in the {form} format cannot be forced", field="tools")
    key = "parameters" if form == "llama" else "arguments"
    return "\n".join([*rules, *_calls(wish, lambda name: head(name, key), "}"), *told])


@dataclass(frozen=True, slots=True)
class _Layout:
    """Where calls stand in an answer, and what else may. Its rules leave `call` to others, and `answer`."""

    wish: ToolWish
    mark: Mark
    json_answer: bool

    def each(self, marker: str, body: str, between: str) -> list[str]:
        """The marker begins every call."""
        more = 0 if self.wish.single else MAX_CALLS - 1
        again = f" ({between} begin {body}){{0,{more}}}" if more else ""
        return self._marked(marker, body, again, 1 + more)

    def together(self, marker: str, body: str) -> list[str]:
        """The marker begins an array, `calls`."""
        more = "" if self.wish.single else f' ("," / ?/ call){{0,{MAX_CALLS - 1}}}'
        return [*self._marked(marker, body, "", 1), f"calls: call{more}"]

    def bare(self) -> list[str]:
        """The whole answer is calls, or else none of it is."""
        more = "" if self.wish.single else f' (";" / ?/ call){{0,{MAX_CALLS - 1}}}'
        if self.wish.required or self.json_answer:
            return self._must(f"call{more}")
        return [f"start: call{more} | TEXT?", r'TEXT: /(?s:.+)/ & ~/\s*\{\s*"name"(?s:.*)/']

    def listed(self, begin: str, end: str) -> list[str]:
        """The whole answer is a list of calls, or else none of it is. Where a text may stand instead, the first
        function's name is in one piece with the bracket."""
        more = "" if self.wish.single else f" (/, ?/ call){{0,{MAX_CALLS - 1}}}"
        head, tail = (f"<[{token}]>? " if (token := self.mark(name)) is not None else "" for name in (begin, end))
        if self.wish.required or self.json_answer:
            return self._must(f'{head}"[" call{more} "]" {tail}')
        functions = [(index, re.escape(function.name)) for index, function in enumerate(self.wish.functions)]
        first = " | ".join(rf'/\[ ?{name}\(/ arguments_{index} ")"' for index, name in functions)
        names = "|".join(name for _, name in functions)
        text = rf"TEXT: /(?s:.+)/ & ~/\s*\[\s*({names})\s*\((?s:.*)/"
        return [f'start: {head}first{more} "]" {tail}| TEXT?', f"first: {first}", text]

    def _must(self, calls: str) -> list[str]:
        if self.wish.required:
            return [f"start: {calls}"]
        return ["start: must | answer", f"must: {calls}"]

    def _marked(self, marker: str, body: str, again: str, most: int) -> list[str]:
        if self.wish.required or self.json_answer:
            return [*self._must(f"begin {body}{again}"), f"begin: {_lark(marker, self.mark)}"]
        if self.mark(marker) is not None:  # no text holds it
            rules = [f"start: TEXT? (begin {body} TEXT?){{0,{most}}}", f"begin: {_lark(marker, self.mark)}"]
            return [*rules, "TEXT: /(?s:.+)/"]
        pattern = re.escape(marker).replace("/", "\\/")
        return [
            f"start: (begin {body}){{0,{most}}} TEXT?",
            f"begin[lazy]: /(?s:.*){pattern}/",
            f"TEXT: /(?s:.+)/ & ~/(?s:.*){pattern}(?s:.*)/",
        ]


def _calls(wish: ToolWish, head: Callable[[str], str], tail: str) -> list[str]:
    """A rule for each function, and one for any of them."""
    rules = ["call: " + " | ".join(f"call_{index}" for index in range(len(wish.functions)))]
    for index, function in enumerate(wish.functions):
        end = f" {_text(tail)}" if tail else ""
        rules.append(f"call_{index}: {head(function.name)} arguments_{index}{end}")
        rules.append(f"arguments_{index}: %json {_schema(function, wish)}")
    return rules


def _head(name: str, key: str) -> str:
    """A call's beginning, in the pieces that JSON has: so the lexer, which is greedy, can tell it from JSON's."""
    return f"""{_text("{")} {_text('"name"')} ":" " "? {_text(f'"{name}"')} "," " "? {_text(f'"{key}"')} ":" " "?"""


def _whole_head(name: str, key: str) -> str:
    """In one piece: so it can tell it from a text, which takes a brace, too."""
    return rf'/\{{"name": ?"{name}", ?"{key}": ?/'


def _schema(function: Function, wish: ToolWish) -> str:
    """An object of its parameters, or, where only asked for its name, any object."""
    return _with_options(_parameters(function, wish), lenient=not function.strict)


def _parameters(function: Function, wish: ToolWish) -> dict[str, Any]:
    if function.strict or wish.required:
        return {**function.parameters, "type": "object"}
    return {"type": "object"}


def _with_options(schema: Mapping[str, Any], *, lenient: bool) -> str:
    """`lenient`: keywords that cannot be kept are let go, else refused."""
    return json.dumps({**schema, "x-guidance": {**_OPTIONS, "lenient": lenient}})


def _lark(marker: str, mark: Mark) -> str:
    token = mark(marker)
    return _text(marker) if token is None else f"<[{token}]>"


def _text(text: str) -> str:
    return json.dumps(text)
