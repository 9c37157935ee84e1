"""Keywords of JSON Schema in Python's calls: what may be written, what may not, what is refused by its name."""

import contextlib
import time
from typing import Any

import pytest

from twostroke.errors import InvalidRequest

from .test_pythonic_calls import matcher, read, takes

TREE = {"type": "object", "properties": {"next": {"$ref": "#/$defs/tree"}, "x": {"type": "null"}},
        "additionalProperties": False}  # fmt: skip
DEFS = {"tree": TREE, "loop": {"$ref": "#/$defs/loop"}, "word": {"type": "string", "maxLength": 3}}


def of(value: Any, **more: Any) -> dict[str, Any]:
    """Parameters of which the argument `a` is this."""
    schema = {"type": "object", "properties": {"a": value}, "required": ["a"], "additionalProperties": False}
    return {**schema, "$defs": DEFS, **more}


CASES: list[tuple[Any, list[str], list[str]]] = [
    (True, ["1", "'x'", "None", "[{'k': [True, 2.5e3]}]", "{}"], ["x", "(1,)", "1e400", "nan", "true", "b''"]),
    ({"type": "string"}, ["'\\''", '"\\u00e9\\n"', "'\"'", '"é"'], ["'\n'", "'\\ud800'", "'\\x41'", "'''x'''", "'"]),
    ({"type": "string", "pattern": "^[a-c]+$"}, ['"abc"'], ['"d"', '""']),
    ({"type": "string", "format": "date"}, ['"2026-01-31"'], ['"tomorrow"']),
    ({"type": "string", "minLength": 2}, ["'ab'", '"a\\n"'], ["'a'"]),
    ({"type": "integer"}, ["0", "-12", "9" * 15], ["01", "1.0", "9" * 16, "+1", "True"]),
    ({"type": "integer", "minimum": 3}, ["3", "1" * 15], ["2", "-4", "9" * 20]),
    ({"type": "integer", "minimum": 10**15}, [str(10**15), str(2 * 10**15)], ["1"]),
    ({"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 99}, ["15"], ["16", "100"]),
    ({"type": "number"}, ["1", "0.5", "-1e-7"], ["1e999", ".5", "1."]),
    ({"minimum": 0, "maximum": 1}, ["0.25", "1"], ["1.5", "'x'"]),
    ({"type": "boolean"}, ["True", "False"], ["true", "1"]),
    ({"const": {"k": ["it's", None]}}, ["""{"k": ["it's", None]}""", "{'k':['it\\'s',None]}"], ["{}"]),
    ({"enum": [1, "1", None], "type": ["string", "null"]}, ["'1'", "None"], ["1"]),
    ({"const": 1, "enum": [1, 2]}, ["1"], ["2"]),
    ({"type": "array", "items": {"type": "null"}, "minItems": 1, "maxItems": 2}, ["[None]", "[None, None]"],
     ["[]", "[None, None, None]", "[1]"]),
    ({"type": "array", "maxItems": 0}, ["[]"], ["[1]"]),
    ({"prefixItems": [{"const": 1}, {"const": 2}], "items": {"const": 3}}, ["[]", "[1]", "[1,2,3, 3]"],
     ["[2]", "[1, 3]"]),
    ({"items": [{"const": 1}], "additionalItems": False}, ["[1]", "[]"], ["[1, 1]"]),
    ({"prefixItems": [True, True], "minItems": 2, "items": False}, ["[1, 'x']"], ["[1]", "[1, 2, 3]"]),
    ({"prefixItems": [{"const": 1}, False]}, ["[]", "[1]"], ["[1, 2]"]),
    ({"additionalProperties": {"const": 1}}, ["{}", "{'x': 1, \"y\":1}"], ["{'x': 2}", "{x: 1}"]),
    ({"properties": {"k": {"const": 1}}, "required": ["k", "z"]}, ["{'k': 1, 'z': 0}", "{'k': 1, 'z': 0, 'y': 0}"],
     ["{'k': 1}", "{'z': 0, 'k': 1}", "{'k': 1, 'z': 0, 'k': 2}", "{'k': 1, 'z': 0, '\\u006b': 2}"]),
    ({"properties": {"k": False}, "additionalProperties": True}, ["{}", "{'j': 1}"], ["{'k': 1}"]),
    ({"$ref": "#/$defs/tree"}, ["{}", "{'next': {'next': {'x': None}}}"], ["{'next': 1}"]),
    ({"$ref": "#/$defs/word", "minLength": 2, "title": "A word"}, ["'abc'"], ["'a'", "'abcd'"]),
    ({"allOf": [{"$ref": "#/$defs/word"}, {"minLength": 3}]}, ["'abc'"], ["'ab'", "'abcd'"]),
    ({"allOf": [{"type": ["integer", "null"]}, {"type": ["number", "string"], "minimum": 2, "maximum": 3}]}, ["2"],
     ["2.5", "None", "'x'", "1"]),
    ({"allOf": [{"properties": {"k": {"minimum": 1, "type": "integer"}}}, {"properties": {"k": {"maximum": 2}}}],
      "required": ["k"]}, ["{'k': 1}"], ["{'k': 3}", "{}"]),
    ({"allOf": [{"enum": [1, 2, 3]}, {"enum": [2, 3, 4]}]}, ["2", "3"], ["1", "4"]),
    ({"anyOf": [{"type": "null"}, {"$ref": "#/$defs/word"}]}, ["None", "'ab'"], ["1"]),
    ({"anyOf": [{"minLength": 2}, {"const": "x"}], "type": "string"}, ["'x'", "'ab'"], ["'a'", "1"]),
    ({"oneOf": [{"type": "integer"}, {"type": "string"}]}, ["1", "'x'"], ["None"]),
    ({"oneOf": [{"type": "object", "properties": {"t": {"const": kind}}, "required": ["t"],
                 "additionalProperties": False} for kind in "pq"]}, ["{'t': 'p'}", "{'t': 'q'}"], ["{'t': 'r'}"]),
    ({"anyOf": [{"$ref": "#/$defs/loop"}, {"const": 1}]}, ["1"], ["2"]),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "good", "bad"), CASES)
def test_keywords(schema: Any, good: list[str], bad: list[str]) -> None:
    start = matcher(of(schema))
    for text in good:
        assert takes(start, f"[f(a={text})]"), text
        assert set(read(f"[f(a={text})]")) == {"a"}
    for text in bad:
        assert not takes(start, f"[f(a={text})]"), text


def test_recursion_ends_where_the_parser_would() -> None:
    start = matcher(of({"$ref": "#/$defs/tree"}))
    for depth, fits in ((15, True), (16, False)):
        assert takes(start, "[f(a=" + "{'next': " * depth + "{}" + "}" * depth + ")]") == fits


@pytest.mark.parametrize(
    ("parameters", "reason"),
    [
        (of({"type": "string", "x-odd": 1}), "x-odd cannot be kept"),
        (of({"type": "array", "uniqueItems": True}), "uniqueItems cannot be kept"),
        (of({"not": {}}), "not cannot be kept"),
        (of({"oneOf": [{"type": "integer"}, {"type": "number"}]}), "may overlap"),
        (of({"enum": [1], "minimum": 0}), "minimum beside enum"),
        (of({"allOf": [{"pattern": "a"}, {"pattern": "b"}]}), "pattern twice"),
        (of({"allOf": [{"properties": {"x": True}, "additionalProperties": False}, {"properties": {"y": True}}]}),
         "additionalProperties beside an allOf"),
    ],
)  # fmt: skip
def test_what_cannot_be_kept_is_refused_where_it_is_strict_and_let_go_elsewhere(
    parameters: dict[str, Any], reason: str
) -> None:
    with pytest.raises(InvalidRequest, match=f"the parameters of f: .*{reason}") as caught:
        matcher(parameters)
    assert caught.value.field == "tools"
    matcher(parameters, strict=False)


@pytest.mark.parametrize(
    ("parameters", "reason"),
    [
        (of({"$ref": "#/$defs/nothing"}), "there is no '#/\\$defs/nothing'"),
        (of({"$ref": "https://example.org/x"}), r"\$ref takes a pointer"),
        (of({"$ref": "#/$defs/loop"}), "no call can satisfy"),
        (of(False), "no call can satisfy"),
        (of({"enum": []}), "no call can satisfy"),
        (of({"type": "integer", "enum": ["x"]}), "no call can satisfy"),
        (of({"enum": [float("inf")]}), "no call can satisfy"),
        (of({"type": "array", "minItems": 3, "maxItems": 2}), "no call can satisfy"),
        (of({"allOf": [{"type": "null"}, {"type": "string"}]}), "no call can satisfy"),
        (of({"$ref": "#/$defs/self"}, **{"$defs": {"self": {"allOf": [{"$ref": "#/$defs/self"}]}}}),
         "refers to itself"),
        (of(7), "a schema is an object"),
        (of({"type": "text"}), "type takes"),
        (of({"anyOf": {}}), "anyOf takes a list"),
        (of({"enum": 1}), "enum takes a list"),
        (of({"prefixItems": {}}), "prefixItems takes a list"),
        (of({"type": "array", "minItems": -1}), "minItems takes a whole number"),
        (of({"type": "string", "maxLength": "3"}), "maxLength takes a whole number"),
        ({"properties": []}, "properties takes an object"),
        ({"properties": {"a=b": True}}, "'a=b' cannot be an argument's name"),
        ({"properties": {" a": True}}, "cannot be an argument's name"),
        (of({"enum": list(range(50_000))}), "too large"),
        (of({"anyOf": [{"allOf": [{"properties": {str(n): True for n in range(300)}}] * 9}] * 99}), "too large"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named_at_once(parameters: dict[str, Any], reason: str) -> None:
    for strict in (True, False):
        begun = time.process_time()
        with pytest.raises(InvalidRequest, match=f"the parameters of f: .*{reason}"):
            matcher(parameters, strict=strict)
        assert time.process_time() - begun < 1


def test_bounds_without_sense_do_no_harm() -> None:
    """JSON's reader gives infinity for 1e999."""
    for bounds in ({"minimum": float("inf")}, {"maximum": True}, {"minimum": "x"}):
        with contextlib.suppress(InvalidRequest, AssertionError):  # the grammar's own compiler has the last word
            matcher(of({"type": "number", **bounds}))
