"""JSON Schemas as one works with them: references followed, `allOf` made one, what cannot be kept let go or refused."""

import json
from collections.abc import Mapping
from typing import Any, TypeAlias

from ....errors import InvalidRequest

Schema: TypeAlias = Mapping[str, Any]
MAX_STEPS = 10_000  # of work, up to ten microseconds each
NOTES = frozenset({
    "$anchor", "$comment", "$defs", "$id", "$schema", "contentEncoding", "contentMediaType", "default", "definitions",
    "deprecated", "description", "example", "examples", "id", "readOnly", "strict", "title", "writeOnly",
    "x-guidance",
})  # fmt: skip
"""Say nothing about what a value may be."""
NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
STRINGS = ("minLength", "maxLength", "pattern", "format")
OBJECTS = ("properties", "required", "additionalProperties")
ARRAYS = ("items", "prefixItems", "additionalItems", "minItems", "maxItems")
TYPES = ("string", "integer", "number", "boolean", "null", "array", "object")
_CHOICES = ("anyOf", "oneOf")
_KNOWN = NOTES | {"$ref", "allOf", "const", "enum", "type", *_CHOICES, *NUMBERS, *STRINGS, *OBJECTS, *ARRAYS}
_GREATER = ("minimum", "exclusiveMinimum", "minLength", "minItems")
_LESS = ("maximum", "exclusiveMaximum", "maxLength", "maxItems")


class SchemaReader:
    """Of one function's parameters. `lenient`: what cannot be kept is let go, else InvalidRequest (field `tools`)."""

    def __init__(self, root: Schema, name: str, *, lenient: bool) -> None:
        self._root, self._name, self._lenient = root, name, lenient
        self._steps = 0

    def simple(self, schema: Any, hops: int = 0) -> Schema | None:
        """The same without notes, `allOf`, `const` and `$ref` (unless it is all); None: nothing satisfies it."""
        self.spend(1 + (len(schema) if isinstance(schema, Mapping) else 0))
        if isinstance(schema, bool):
            return {} if schema else None
        if not isinstance(schema, Mapping):
            raise self.refusal("a schema is an object, true or false")
        kept = {key: value for key, value in schema.items() if self._keeps(key)}
        if "const" in kept:
            kept = {"enum": [kept.pop("const")], **kept} if "enum" not in kept else _with_const(kept)
        parts: list[Any] = list(_listed(self, kept.pop("allOf", []), "allOf"))
        if "$ref" in kept and (len(kept) > 1 or parts):
            parts.append(self.resolve(kept.pop("$ref")))
        if hops > len(TYPES) * 4:
            raise self.refusal("the schema refers to itself")
        whole: Schema | None = kept
        for part in parts:
            more = self.simple(part, hops + 1)
            if more is not None and "$ref" in more:
                more = self.simple(self.resolve(more["$ref"]), hops + 1)
            whole = None if whole is None or more is None else self.both(whole, more)
        return whole

    def resolve(self, pointer: Any) -> Any:
        """What a `$ref` means."""
        if not isinstance(pointer, str) or not (pointer == "#" or pointer.startswith("#/")):
            raise self.refusal(f"$ref takes a pointer into the same schema, #/..., not {str(pointer)[:80]!r}")
        found: Any = self._root
        for part in pointer.split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            if isinstance(found, list) and key.isascii() and key.isdigit() and int(key) < len(found):
                found = found[int(key)]
            elif isinstance(found, Mapping) and key in found:
                found = found[key]
            else:
                raise self.refusal(f"there is no {pointer[:80]!r}")
        return found

    def alternatives(self, schema: Schema) -> list[Schema | None] | None:
        """The ways that an `anyOf` or `oneOf` leaves, each with all that stands beside it; None where there is none."""
        key = next((key for key in _CHOICES if key in schema), None)
        if key is None:
            return None
        base = {name: value for name, value in schema.items() if name != key}
        ways = [self.simple(way) for way in _listed(self, schema[key], key)]
        whole = ways if not base else [self._beside(base, way) for way in ways]
        if key == "oneOf" and not self._lenient and not self._apart([way for way in whole if way is not None]):
            raise self.refusal("two ways of a oneOf may overlap: send anyOf")
        return whole

    def types(self, schema: Schema) -> tuple[str, ...]:
        """That a value may have: those named, else those that its keywords are about, else all."""
        named = schema.get("type")
        if named is not None:
            names = [named] if isinstance(named, str) else named
            if not isinstance(names, list) or not all(name in TYPES for name in names):
                raise self.refusal(f"type takes one or several of {', '.join(TYPES)}")
            return tuple(name for name in dict.fromkeys(names) if name != "integer" or "number" not in names)
        about = {"string": STRINGS, "number": NUMBERS, "array": ARRAYS, "object": OBJECTS}
        meant = tuple(name for name, keys in about.items() if any(key in schema for key in keys))
        return meant or tuple(name for name in TYPES if name != "integer")

    def both(self, one: Schema, other: Schema) -> Schema | None:
        """What satisfies both of two simple schemas."""
        self.spend(len(one) + len(other))
        told = dict(one)
        if "type" in one and "type" in other:
            told["type"] = _common_types(self.types(one), self.types(other))
            if not told["type"]:
                return None
        for key, value in other.items():
            if key not in told:
                told[key] = value
            elif key != "type" and told[key] != value:
                told[key] = self._join(key, told[key], value)
        if told.get("enum") == []:
            return None
        if ("properties" in one and other.get("additionalProperties", True) is not True) or (
            "properties" in other and one.get("additionalProperties", True) is not True
        ):
            self.let_go("additionalProperties beside an allOf")
        return told

    def spend(self, steps: int) -> None:
        """InvalidRequest where a schema takes too much work."""
        self._steps += steps
        if self._steps > MAX_STEPS:
            raise self.refusal("they are too large")

    def let_go(self, what: str) -> None:
        """InvalidRequest unless lenient."""
        if not self._lenient:
            raise self.refusal(f"{what} cannot be kept in this model's form of calls: leave it out, or strict")

    def refusal(self, reason: str) -> InvalidRequest:
        """Of these parameters."""
        return InvalidRequest(f"the parameters of {self._name}: {reason}", field="tools")

    def _keeps(self, key: str) -> bool:
        if key not in _KNOWN:
            self.let_go(key)
        return key in _KNOWN and key not in NOTES

    def _beside(self, base: Schema, way: Schema | None) -> Schema | None:
        if way is not None and "$ref" in way:
            way = self.simple(self.resolve(way["$ref"]))
        return None if way is None else self.both(base, way)

    def _join(self, key: str, one: Any, other: Any) -> Any:
        if key in _GREATER or key in _LESS:
            if all(isinstance(each, int | float) for each in (one, other)):
                return max(one, other) if key in _GREATER else min(one, other)
        elif key == "required" and isinstance(one, list) and isinstance(other, list):
            return [*one, *other]
        elif key == "properties" and isinstance(one, Mapping) and isinstance(other, Mapping):
            self.spend(5 * (len(one) + len(other)))
            shared = {name: {"allOf": [one[name], other[name]]} for name in one if name in other}
            return {**one, **other, **shared}
        elif key == "enum" and isinstance(one, list) and isinstance(other, list):
            kept = {json.dumps(each, sort_keys=True) for each in other}
            return [each for each in one if json.dumps(each, sort_keys=True) in kept]
        self.let_go(f"{key} twice, by allOf or $ref,")
        return one

    def _apart(self, ways: list[Schema]) -> bool:
        """Whether no value can be of two ways."""
        signs = [self._signs(way) for way in ways]
        self.spend(len(ways) ** 2)
        return all(
            any(key in two and not (one[key] & two[key]) for key in one)
            for index, one in enumerate(signs)
            for two in signs[:index]
        )

    def _signs(self, way: Schema) -> dict[str, set[str]]:
        """What tells a way: the types of its values, the values, and those of properties that must be there."""
        whole = self.simple(self.resolve(way["$ref"])) if "$ref" in way else way
        if whole is None:
            return {}
        types = {"number" if name == "integer" else name for name in self.types(whole)}
        told = {"type": types if "type" in whole else set(TYPES)}
        if isinstance(whole.get("enum"), list):
            told["value"] = {json.dumps(each, sort_keys=True) for each in whole["enum"]}
        properties = whole.get("properties", {})
        for name in whole.get("required", []) if told["type"] == {"object"} and isinstance(properties, Mapping) else []:
            inner = self.simple(properties.get(name, True))
            if inner is not None and isinstance(inner.get("enum"), list):
                told[f".{name}"] = {json.dumps(each, sort_keys=True) for each in inner["enum"]}
        return told


def _with_const(schema: dict[str, Any]) -> dict[str, Any]:
    const = json.dumps(schema.pop("const"), sort_keys=True)
    values = schema["enum"] if isinstance(schema["enum"], list) else []
    return {**schema, "enum": [each for each in values if json.dumps(each, sort_keys=True) == const]}


def _common_types(one: tuple[str, ...], other: tuple[str, ...]) -> list[str]:
    both = [name for name in one if name in other]
    if "number" in one + other and "integer" in one + other and "integer" not in both:
        both.append("integer")
    return both


def _listed(reader: SchemaReader, value: Any, key: str) -> list[Any]:
    if not isinstance(value, list):
        raise reader.refusal(f"{key} takes a list")
    return value
