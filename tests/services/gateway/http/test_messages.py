"""`messages`: what they mean to a chat template; what is wrong is named."""

import json
from typing import Any

import pytest

from twostroke.errors import InvalidRequest
from twostroke.services.gateway.generation import Turn
from twostroke.services.gateway.http.errors import HttpRefusal
from twostroke.services.gateway.http.messages import read_messages

CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}


def refusal(value: Any) -> HttpRefusal:
    with pytest.raises(HttpRefusal) as caught:
        read_messages(value)
    return caught.value


def test_messages() -> None:
    turns = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "Bob"},
        {"role": "assistant", "content": "", "tool_calls": [], "refusal": None, "name": None},
        {"role": "assistant", "content": None, "refusal": "No."},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}], "reasoning_content": "hm"},
        {"role": "whoever", "content": []},
    ]
    assert read_messages(turns) == (
        Turn("system", "be brief"),
        Turn("user", "a\nb", {"name": "Bob"}),
        Turn("assistant"),
        Turn("assistant", "No."),
        Turn("assistant", "No.", {"reasoning_content": "hm"}),
        Turn("whoever"),
    )


def test_calls_and_their_answers() -> None:
    """Arguments are an object, as templates want it; an answer has the function's name."""
    turns = read_messages(
        [
            {"role": "user", "content": "go"},
            {"role": "assistant", "content": None, "tool_calls": [CALL, {**CALL, "id": "c2", "index": 1}]},
            {"role": "tool", "content": "42", "tool_call_id": "c1"},
            {"role": "tool", "content": [{"type": "text", "text": "43"}], "tool_call_id": "c2", "name": "own"},
            {"role": "tool", "content": "44", "tool_call_id": "who"},
        ]
    )
    told = {"name": "f", "arguments": {"a": 1}}
    calls = [{"id": name, "type": "function", "function": told} for name in ("c1", "c2")]
    assert turns[1:] == (
        Turn("assistant", "", {"tool_calls": calls}),
        Turn("tool", "42", {"tool_call_id": "c1", "name": "f"}),
        Turn("tool", "43", {"tool_call_id": "c2", "name": "own"}),
        Turn("tool", "44", {"tool_call_id": "who"}),
    )
    assert turns[1].message() == {"role": "assistant", "content": "", "tool_calls": calls}


@pytest.mark.parametrize(("text", "meant"), [("", {}), ('{"a": ', '{"a": '), ("[1]", "[1]"), ("{}", {})])
def test_arguments_that_are_no_object_go_back_as_they_came(text: str, meant: Any) -> None:
    call = {**CALL, "function": {"name": "f", "arguments": text}}
    (turn,) = read_messages([{"role": "assistant", "tool_calls": [call]}])
    assert turn.more["tool_calls"][0]["function"]["arguments"] == meant


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (5, "messages[1]"),
        ({"content": "x"}, "messages[1].role"),
        ({"role": 5, "content": "x"}, "messages[1].role"),
        ({"role": "user"}, "messages[1].content"),
        ({"role": "assistant", "content": None}, "messages[1].content"),
        ({"role": "user", "content": 5}, "messages[1].content"),
        ({"role": "user", "content": "x", "name": 5}, "messages[1].name"),
        ({"role": "assistant", "content": "x", "tool_calls": [{"id": "1"}]}, "messages[1].tool_calls[0].function"),
        ({"role": "assistant", "tool_calls": [{**CALL, "type": "custom"}]}, "messages[1].tool_calls[0].type"),
        ({"role": "assistant", "tool_calls": [{**CALL, "x": 1}]}, "messages[1].tool_calls[0].x"),
        ({"role": "assistant", "tool_calls": [CALL] * 129}, "messages[1].tool_calls"),
        ({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]},
         "messages[1].tool_calls[0].function.arguments"),
        ({"role": "assistant", "content": "", "function_call": {"name": "f"}}, "messages[1].function_call"),
        ({"role": "assistant", "content": "", "audio": {"id": "x"}}, "messages[1].audio"),
        ({"role": "user", "content": "x", "foo": 1}, "messages[1].foo"),
        ({"role": "user", "content": ["x"]}, "messages[1].content[0]"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, "messages[1].content[0].type"),
        ({"role": "user", "content": [{"type": "text", "text": 5}]}, "messages[1].content[0].text"),
        ({"role": "user", "content": [{"text": "x"}]}, "messages[1].content[0].type"),
    ],
    ids=json.dumps,
)  # fmt: skip
def test_messages_that_are_none(message: Any, field: str) -> None:
    assert refusal([{"role": "user", "content": "hi"}, message]).field == field


def test_messages_are_counted_first() -> None:
    assert refusal("x").field == "messages"
    for wrong in ([], [5] * 4097):
        with pytest.raises(InvalidRequest) as caught:
            read_messages(wrong)
        assert caught.value.field == "input.chat.messages"
