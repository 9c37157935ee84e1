"""Rules, in llguidance's Lark, of Python's literals for the values of a JSON Schema."""

import json
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

from .python_text import COMMA, any_of, lark, listed, pattern, quoted, string
from .pythonic import NOT_IN_NAMES
from .schema import NUMBERS, STRINGS, Schema, SchemaReader

MAX_NESTING = 16  # of an argument's value; the parser takes more
MAX_ITEMS = 1024  # of a list, and names beside those that a schema knows
MAX_NUMBER = 10**15  # where a schema bounds a number on one side
_ANY_NESTING = 6
_WHOLE = "-?(0|[1-9][0-9]{0,14})"
TERMINALS = (
    f"PY_INTEGER: /{_WHOLE}/",
    rf"PY_NUMBER: /{_WHOLE}(\.[0-9]{{1,17}})?([eE][-+]?[0-9]{{1,2}})?/",
    "PY_NAME: /[A-Za-z_][A-Za-z0-9_]{0,63}/",
    'PY_BOOLEAN: "True" | "False"',
    'py_0: PY_STRING | PY_NUMBER | PY_BOOLEAN | "None"',
    *(
        f'py_{n}: py_0 | "[" (py_{n - 1} ({COMMA} py_{n - 1}){{0,{MAX_ITEMS}}})? "]"'
        f' | "{{" (PY_STRING /: ?/ py_{n - 1} ({COMMA} PY_STRING /: ?/ py_{n - 1}){{0,{MAX_ITEMS}}})? "}}"'
        for n in range(1, _ANY_NESTING + 1)
    ),
)
"""Shared by all rules; `PY_STRING` comes from `string`."""


class PythonValues:
    """Of one function's parameters. Rules gather in `rules`; an expression of None stands for what cannot be."""

    def __init__(self, reader: SchemaReader, prefix: str, *, lenient: bool) -> None:
        self._reader, self._prefix, self._lenient = reader, prefix, lenient
        self._named: dict[tuple[str, int], str | None] = {}  # rules by `$ref` and depth; None: impossible or under way
        self.rules: list[str] = []

    def arguments(self, schema: Schema) -> str | None:
        """What stands between a call's parentheses; may be empty."""
        whole = self._reader.simple(schema)
        while whole is not None and "$ref" in whole:
            whole = self._reader.simple(self._reader.resolve(whole["$ref"]))
        ways = self._reader.alternatives(whole) if whole is not None else None
        if ways is not None:
            told = [self._body(way, MAX_NESTING, call=True) for way in ways if way is not None]
            return self._rule(any_of(each or lark("") for each in told if each is not None))
        return self._body(whole, MAX_NESTING, call=True) if whole is not None else None

    def value(self, schema: Any, depth: int) -> str | None:
        """`depth`: how many brackets may still be opened."""
        simple = self._reader.simple(schema)
        if simple is None:
            return None
        if "$ref" in simple:
            return self._reference(simple["$ref"], depth)
        ways = self._reader.alternatives(simple)
        if ways is not None:
            return any_of(self.value(way, depth) for way in ways if way is not None)
        if not simple:
            return f"py_{min(depth, _ANY_NESTING)}"
        if "enum" in simple:
            return self._enum(simple)
        return any_of(self._typed(name, simple, depth) for name in self._reader.types(simple))

    def _reference(self, pointer: Any, depth: int) -> str | None:
        target = self._reader.resolve(pointer)
        key = (pointer, depth)
        if key not in self._named:
            self._named[key] = None
            self._named[key] = self._rule(self.value(target, depth))
        return self._named[key]

    def _typed(self, name: str, schema: Schema, depth: int) -> str | None:
        match name:
            case "string":
                return self._string(schema)
            case "integer" | "number":
                return self._number(name, schema)
            case "boolean":
                return "PY_BOOLEAN"
            case "null":
                return '"None"'
            case "array":
                return self._array(schema, depth - 1) if depth else None
            case _:
                body = self._body(schema, depth - 1) if depth else None
                return None if body is None else f'"{{" {body} "}}"'

    def _string(self, schema: Schema) -> str:
        if "pattern" in schema or "format" in schema:  # in JSON's way: its strings are Python's, too
            return self._json("string", {key: schema[key] for key in STRINGS if key in schema})
        least, most = self._bounds(schema, "minLength", "maxLength")
        return "PY_STRING" if least == 0 and most is None else f"/{string(least, most)}/"

    def _number(self, name: str, schema: Schema) -> str:
        bounds = {key: schema[key] for key in NUMBERS if key in schema}
        if not bounds:
            return "PY_INTEGER" if name == "integer" else "PY_NUMBER"
        lower, upper = _numbers(bounds, "minimum", "exclusiveMinimum"), _numbers(bounds, "maximum", "exclusiveMaximum")
        if not lower:  # digits without end would make an infinite number, or none at all
            bounds["minimum"] = min([-MAX_NUMBER, *(2 * each for each in upper)])
        if not upper:
            bounds["maximum"] = max([MAX_NUMBER, *(2 * each for each in lower)])
        return self._json(name, bounds)

    def _json(self, name: str, keys: Mapping[str, Any]) -> str:
        options = {"lenient": self._lenient, "whitespace_flexible": False}
        return self._rule("%json " + json.dumps({"type": name, **keys, "x-guidance": options})) or ""

    def _enum(self, schema: Schema) -> str | None:
        values = schema["enum"]
        if not isinstance(values, list):
            raise self._reader.refusal("enum takes a list")
        self._reader.spend(len(values))
        if others := set(schema) - {"enum", "type"}:
            self._reader.let_go(f"{min(others)} beside enum")
        types = self._reader.types({"type": schema["type"]}) if "type" in schema else None
        kept = [each for each in values if types is None or _types_of(each) & set(types)]
        return self._rule(any_of(self._literal(each, MAX_NESTING) for each in kept))

    def _literal(self, value: Any, depth: int) -> str | None:
        self._reader.spend(1)
        match value:
            case bool() | None:
                return lark(str(value))
            case int() | float():
                return lark(json.dumps(value)) if _is_number(value) else None
            case str():
                return f"({quoted(value)})"
            case list() if depth:
                return self._sequence("[", (self._literal(each, depth - 1) for each in value), "]")
            case dict() if depth:
                pairs = ((self._literal(key, 0), self._literal(each, depth - 1)) for key, each in value.items())
                return self._sequence("{", (each and f"{key} /: ?/ {each}" for key, each in pairs), "}")
        return None

    def _sequence(self, head: str, parts: Iterable[str | None], tail: str) -> str | None:
        told = list(parts)
        return None if None in told else f"{lark(head)} {f' {COMMA} '.join(map(str, told))} {lark(tail)}"

    def _array(self, schema: Schema, depth: int) -> str | None:
        least, most = self._bounds(schema, "minItems", "maxItems")
        items, first = schema.get("items", True), schema.get("prefixItems", [])
        if isinstance(items, list):  # before draft 2020-12
            items, first = schema.get("additionalItems", True), items
        if not isinstance(first, list):
            raise self._reader.refusal("prefixItems takes a list")
        most = min(len(first) + MAX_ITEMS, most if most is not None else MAX_ITEMS * 2)
        told: list[str] = []
        for each in first[:most]:
            value = self._rule(self.value(each, depth))
            if value is None:
                most = len(told)
                break
            told.append(value)
        rest = self._rule(self.value(items, depth)) if most > len(told) else None
        most = most if rest is not None else len(told)
        return f'"[" {listed(told, rest, least, most)} "]"' if least <= most else None

    def _body(self, schema: Schema, depth: int, *, call: bool = False) -> str | None:
        """Of an object without its braces, or of a call: properties in the schema's order, then others."""
        properties, required = schema.get("properties", {}), schema.get("required", [])
        if not isinstance(properties, Mapping) or not isinstance(required, list):
            raise self._reader.refusal("properties takes an object, required a list")
        others = schema.get("additionalProperties", True)
        names = [*properties, *dict.fromkeys(str(name) for name in required if str(name) not in properties)]
        more = ""
        if others is not False and (value := self._rule(self.value(others, depth))) is not None:
            more = f"{self._other_key(names, call=call)} {value}"
        pairs: list[tuple[str, bool]] = []
        for name in names:
            value = self._rule(self.value(properties.get(name, others), depth))
            if value is not None:
                pairs.append((f"{self._key(name, call=call)} {value}", name in required))
            elif name in required:
                return None
        return self._ordered(pairs, more)

    def _ordered(self, pairs: list[tuple[str, bool]], more: str) -> str:
        """The required ones, any of the rest, with commas between them."""
        rest = f"({COMMA} {more}){{0,{MAX_ITEMS}}}" if more else ""
        ways: list[str] = [f"{more} {rest}"] if more else []  # to begin with: each pair up to the first required one
        for pair, needed in reversed(pairs):
            ways = [f"{pair} {rest}"] if needed else [f"{pair} {rest}", *ways]
            rest = self._rule(f"{COMMA} {pair} {rest}" if needed else f"({COMMA} {pair})? {rest}") or ""
        if not ways:
            return ""
        whole = self._rule(" | ".join(ways)) or ""
        return whole if any(needed for _, needed in pairs) else f"{whole}?"

    def _key(self, name: str, *, call: bool) -> str:
        if not call:
            return f"({quoted(name)}) /: ?/"
        if not name or name != name.strip() or NOT_IN_NAMES & set(name) or not name.isprintable():
            raise self._reader.refusal(f"{name[:80]!r} cannot be an argument's name in this model's form of calls")
        return lark(name + "=")

    def _other_key(self, names: list[str], *, call: bool) -> str:
        """Of none of these names; written without escapes, by which it could be one of them after all."""
        terminal = f"{self._prefix.upper()}KEY_{len(self.rules)}"
        taken = "|".join(pattern(name) for name in names)
        if call:
            self.rules.append(f"{terminal}: PY_NAME" + (f" & ~/{taken}/" if taken else ""))
            return f'{terminal} "="'
        form = r""""[^"\\\x00-\x1f]{0,256}"|'[^'\\\x00-\x1f]{0,256}'"""
        self.rules.append(f"{terminal}: /{form}/" + (f" & ~/[\"']({taken})[\"']/" if taken else ""))
        return f"{terminal} /: ?/"

    def _bounds(self, schema: Schema, least: str, most: str) -> tuple[int, int | None]:
        for key in (least, most):
            value = schema.get(key, 0)
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise self._reader.refusal(f"{key} takes a whole number, 0 or more")
        return schema.get(least, 0), schema.get(most)

    def _rule(self, expression: str | None) -> str | None:
        """A name for it, so that what uses it stays short."""
        if expression is None or re.fullmatch(r"\w*", expression):
            return expression
        self.rules.append(f"{self._prefix}{len(self.rules)}: {expression}")
        return f"{self._prefix}{len(self.rules) - 1}"


def _numbers(schema: Schema, *keys: str) -> list[int]:
    return [int(schema[key]) for key in keys if _is_number(schema.get(key))]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _types_of(value: Any) -> set[str]:
    match value:
        case bool():
            return {"boolean"}
        case None:
            return {"null"}
        case str():
            return {"string"}
        case int() | float():
            return {"number", "integer"} if isinstance(value, int) or value.is_integer() else {"number"}
        case list():
            return {"array"}
    return {"object"}
