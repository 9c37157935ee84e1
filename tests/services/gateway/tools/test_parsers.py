"""Each format's text, cut anywhere, gives the same events; what is no call stays text, whole."""

import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from twostroke.services.gateway.tools.events import (
    Arguments,
    CallBegun,
    CallBroken,
    CallEnded,
    Event,
    Text,
    joined,
)
from twostroke.services.gateway.tools.formats import FORMATS
from twostroke.services.gateway.tools.tool_parser import MAX_SPACE

NAMES = frozenset({"f", "get_weather"})
MARKED = ("hermes", "mistral", "phi4")  # whose calls may have any name


def read(form: str, *pieces: str) -> list[Event]:
    parser = FORMATS[form].parser(NAMES)
    events: list[Event] = []
    for piece in pieces:
        events += parser.push(piece)
    return joined(events + parser.flush())


def call(name: str, arguments: str) -> list[Event]:
    return [CallBegun(name), Arguments(arguments), CallEnded()]


ONE = call("f", '{"a": 1}')
TWO = [*ONE, *call("get_weather", '{"b": "}\\""}')]
J1 = '{"name": "f", "arguments": {"a": 1}}'
J2 = '{"name": "get_weather", "arguments": {"b": "}\\""}}'
L1, L2 = J1.replace("arguments", "parameters"), J2.replace("arguments", "parameters")

CASES: list[tuple[str, str, list[Event]]] = [
    ("hermes", f"<tool_call>\n{J1}\n</tool_call>", ONE),
    ("hermes", f"<tool_call>{J1}</tool_call>\n<tool_call>\n{J2}\n</tool_call>\n", TWO),
    ("hermes", f"Let me see.\n\n<tool_call>{J1}</tool_call> Done.", [Text("Let me see."), *ONE, Text("Done.")]),
    ("hermes", f"<tool_call>{J1}", ONE),
    ("hermes", f"<tool_call>[{J1}, {J2}]</tool_call>", TWO),
    ("phi4", f"<|tool_call|>{J1}<|/tool_call|>", ONE),
    ("hermes", f"<tool_call>{J1} and", [*ONE, Text("and")]),
    ("hermes", f"<tool_call><tool_call>{J1}</tool_call>", [Text("<tool_call>"), *ONE]),
    ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', ONE),
    ("hermes", '<tool_call>{"id": 7, "name": "f", "x": [{}], "arguments": {"a": 1}}</tool_call>', ONE),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', ONE),
    ("hermes", '<tool_call>{"name": "\\u0066", "arguments": {"a": 1}, "n": 12}</tool_call>', ONE),
    ("hermes", '<tool_call>{"name": "f", "arguments": null}</tool_call>', call("f", "{}")),
    ("hermes", '<tool_call>{"name": "f"}</tool_call>', call("f", "{}")),
    ("hermes", '<tool_call>{"name": "other", "arguments": {}}</tool_call>', call("other", "{}")),
    ("llama", L1, ONE),
    ("llama", f" {L1}\n", ONE),
    ("llama", f"<|python_tag|>{L1}; {L2}", TWO),
    ("llama", f"{L1}\n{L2}", TWO),
    ("llama", f"I call <|python_tag|>{L1}", [Text("I call"), *ONE]),
    ("mistral", f"[TOOL_CALLS] [{J1}]", ONE),
    ("mistral", f"[TOOL_CALLS][{J1}, {J2}]", TWO),
    ("mistral", f"Well. [TOOL_CALLS] [ {J1} ] So.", [Text("Well."), *ONE, Text("So.")]),
    ("mistral", '[TOOL_CALLS]f{"a": 1}', ONE),
    ("mistral", '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]get_weather[CALL_ID]a1b[ARGS]{"b": "}\\""}', TWO),
    ("phi4", f"functools[{J1}, {J2}]", TWO),
    ("phi4", f"<|tool_call|>[{J1}]<|/tool_call|>", ONE),
    ("phi4", f"<|tool_call|>\n[{J1}] x", [*ONE, Text("x")]),
    ("pythonic", '[f(a=1), get_weather(b="}\\"")]', TWO),
    ("pythonic", "[f(a=1)] x", [*ONE, Text("x")]),
    ("pythonic", "<|python_start|>[f(a=[1, {'b': None}, ')]'])]", call("f", '{"a": [1, {"b": null}, ")]"]}')),
    ("pythonic", "[f()]", call("f", "{}")),
    ("pythonic", " [ f ( a = 1 , ) , f(),]", [*ONE, *call("f", "{}")]),
    ("pythonic", "<|python_tag|>[f(a=1)]", ONE),
    ("pythonic", "[f(from=1, start-date='x', the name=(1, 2))]",
     call("f", '{"from": 1, "start-date": "x", "the name": [1, 2]}')),
    ("pythonic", "[f(a='\\d', a='\\ud83d\\ude00\\ud800')]", call("f", '{"a": "\U0001f600\ufffd"}')),
    ("pythonic", "[f(a='\\d')]", call("f", '{"a": "\\\\d"}')),
]  # fmt: skip
NO_CALLS = [
    ("hermes", "<tool_call>"),
    ("hermes", "<tool_call>f(1)</tool_call>"),
    ("hermes", "<tool_call>[1]</tool_call>"),
    ("hermes", '<tool_call>{"arguments": {"a": 1}}</tool_call>'),
    ("hermes", '<tool_call>{"name": 5, "arguments": {"a": 1}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "", "arguments": {"a": 1}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": "x"}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "name": "g", "arguments": {}}</tool_call>'),
    ("hermes", "a < b <tool <tool_call"),
    ("hermes", "\n \n"),
    ("llama", '{"name": "unknown", "parameters": {"a": 1}}'),
    ("llama", '{"a": {"name": "f", "parameters": {}}}'),
    ("llama", 'JSON: {"name": "f", "parameters": {"a": 1}}'),
    ("llama", "<|python_tag|>print(1)"),
    ("llama", "{"),
    ("mistral", "[TOOL_CALLS]"),
    ("mistral", "[TOOL_CALLS] [1]"),
    ("mistral", "[TOOL_CALLS]what a day {1}"),
    ("mistral", "[TOOL_CALLS]" + "x" * 300 + "{}"),
    ("mistral", "[TOOL"),
    ("phi4", "functools[0]"),
    ("phi4", "functools.partial"),
    ("pythonic", "[1, 2]"),
    ("pythonic", "[f(1)]"),
    ("pythonic", "[f(a=b)]"),
    ("pythonic", "[f(**{})]"),
    ("pythonic", "[g(a=1)]"),
    ("pythonic", "[f(a=1"),
    ("pythonic", "[f(a=1)}"),
    ("pythonic", "[f(a={1})]"),
    ("pythonic", "[f(" + "(" * 80),
    ("pythonic", "[f(a=" + "-" * 5000 + "1)]"),
    ("pythonic", "[f(a='" + "x" * 70_000),
    ("pythonic", "[f(=1)]"),
    ("pythonic", "[f(a=)]"),
    ("pythonic", "[f(a=1 b=2)]"),
    ("pythonic", "[f(a==1)]"),
    ("pythonic", "[f(a=(1)]"),
    ("pythonic", "[f(a=b'1')]"),
    ("pythonic", "[f(a=1e999)]"),
    ("pythonic", "[f(a=#)]"),
    ("pythonic", "[]"),
    ("pythonic", "[f(a=1), get]"),
]  # fmt: skip


@pytest.mark.parametrize(("form", "text", "expected"), CASES)
def test_calls(form: str, text: str, expected: list[Event]) -> None:
    assert read(form, text) == expected
    assert read(form, *text) == expected


@pytest.mark.parametrize(("form", "text"), NO_CALLS)
def test_what_is_no_call_is_text(form: str, text: str) -> None:
    assert read(form, text) == [Text(text)]
    assert read(form, *text) == [Text(text)]


@pytest.mark.parametrize(
    ("form", "head", "arguments", "rest"),
    [
        ("hermes", '<tool_call>{"name": "f", "arguments": ', '{"a": tru', "</tool_call> x"),
        ("hermes", '<tool_call>{"name": "f", "arguments": ', '{"a": [1, ', "</tool_call>"),
        ("hermes", '\n<tool_call>{"name": "f", "arguments": ', '{"a": {}', ""),
        ("llama", '{"name": "f", "parameters": ', '{"a": 1,', ",}}"),
        ("mistral", "[TOOL_CALLS]f", '{"a": "', "\n"),
        ("phi4", 'functools[{"name": "f", "arguments": ', '{"a', ""),
    ],
)
def test_a_call_that_breaks_off(form: str, head: str, arguments: str, rest: str) -> None:
    """Its arguments were on their way: the event that it is none says all of it, and the rest is text."""
    text = head + arguments + rest
    events = read(form, text)
    assert events == read(form, *text)
    assert events[:3] == [CallBegun("f"), Arguments(arguments), CallBroken(head + arguments)]
    assert events[3:] == ([Text(rest)] if rest else [])


@settings(max_examples=60, deadline=None)
@given(st.data(), st.sampled_from([(form, text) for form, text, _ in CASES] + NO_CALLS))
def test_how_a_text_is_cut_does_not_matter(data: st.DataObject, case: tuple[str, str]) -> None:
    form, text = case
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert read(form, *pieces) == read(form, text)


SHREDS = st.lists(
    st.sampled_from(
        ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "functools[", "<|tool_call|>", "[",
         "]", "{", "}", '"name"', '"f"', ":", ",", '"arguments"', '"parameters"', "1", " ", "\n", "f", "(", ")", "a=",
         "x", '"', "\\", ";", J1, L2]
    ),
    max_size=14,
).map("".join)  # fmt: skip


@settings(deadline=None)
@given(st.sampled_from(sorted(FORMATS)), SHREDS, st.integers(1, 7))
@example("hermes", f" <tool_call> <tool_call>{J1[:-3]}", 3)
def test_any_text_cut_anyhow(form: str, text: str, width: int) -> None:
    """The same events; calls are whole and valid; nothing but white space and marks is lost."""
    events = read(form, text)
    assert events == read(form, *(text[at : at + width] for at in range(0, len(text), width)))
    open_, told = False, ""
    for event in events:
        match event:
            case CallBegun(name):
                assert not open_
                assert name in NAMES or form in MARKED
                open_, told = True, ""
            case Arguments(piece):
                assert open_
                told += piece
            case CallEnded():
                assert open_
                assert isinstance(json.loads(told), dict)
                open_ = False
            case CallBroken(raw):
                assert open_
                assert raw.endswith(told)
                assert raw in text
                open_ = False
            case Text(piece):
                assert not open_
                assert piece
    assert not open_
    if not any(isinstance(event, CallBegun) for event in events):
        assert events == ([Text(text)] if text else [])


VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=4,
)


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from(sorted(FORMATS)),
    st.dictionaries(st.from_regex("[a-z]{1,5}", fullmatch=True), VALUES, max_size=4),
    st.data(),
)
def test_any_arguments_come_back(form: str, arguments: dict[str, Any], data: st.DataObject) -> None:
    text = json.dumps(arguments, ensure_ascii=data.draw(st.booleans()))
    pythonic = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
    whole = {
        "hermes": f'<tool_call>\n{{"name": "f", "arguments": {text}}}\n</tool_call>',
        "llama": f'{{"name": "f", "parameters": {text}}}',
        "mistral": f'[TOOL_CALLS][{{"name": "f", "arguments": {text}}}]',
        "phi4": f'functools[{{"name": "f", "arguments": {text}}}]',
        "pythonic": f"[f({pythonic})]",
    }[form]
    begun, told, ended = read(form, whole)
    assert (begun, ended) == (CallBegun("f"), CallEnded())
    assert isinstance(told, Arguments)
    assert json.loads(told.text) == arguments
    assert form == "pythonic" or told.text == text


def test_text_is_held_back_only_where_a_call_may_begin() -> None:
    parser = FORMATS["hermes"].parser(NAMES)
    assert parser.push("Hello, wor") == [Text("Hello, wor")]
    assert parser.push("ld \n") == [Text("ld")]
    assert parser.push("<tool") == []
    assert parser.push("box>") == [Text(" \n<toolbox>")]
    assert joined(parser.push(" " * (MAX_SPACE + 9))) == [Text(" " * 9)]
    assert parser.flush() == [Text(" " * MAX_SPACE)]


def test_arguments_go_out_as_they_come() -> None:
    parser = FORMATS["hermes"].parser(NAMES)
    assert parser.push('<tool_call>{"name": "f", "arguments": ') == []
    assert parser.push('{"a') == [CallBegun("f"), Arguments('{"a')]
    assert parser.push('": 1') == [Arguments('": 1')]
    assert parser.push("}") == [Arguments("}")]
    assert parser.push("}") == [CallEnded()]
    assert parser.flush() == []
