"""Calls in an answer: deltas and whole messages say the same, whatever is between calls and however they end."""

import json
from itertools import count
from typing import Any

import pytest

from twostroke.services.gateway.http.calls import CallReader
from twostroke.services.gateway.tools.formats import FORMATS

F = '<tool_call>{"name": "f", "arguments": {"a": "é\\n"}}</tool_call>'
BROKEN = '<tool_call>{"name": "f", "arguments": {"a": 1;}}</tool_call>'


def reader(*, single: bool = False) -> CallReader:
    names = (f"call_{number}" for number in count())
    return CallReader(FORMATS["hermes"].parser(frozenset("f")), lambda: next(names), single=single)


def streamed(text: str, width: int, *, single: bool = False) -> tuple[str, list[dict[str, Any]], int]:
    """Content, calls and how many are whole, as a client puts deltas together."""
    it = reader(single=single)
    content, calls = "", []
    pieces = [text[at : at + width] for at in range(0, len(text), width)]
    for index, piece in enumerate(pieces):
        for delta in map(json.loads, it.deltas(piece, last=index == len(pieces) - 1)):
            content += delta.get("content", "")
            for call in delta.get("tool_calls", ()):
                if "id" in call:
                    assert (call["index"], call["type"]) == (len(calls), "function")
                    calls.append({"id": call["id"], **call["function"]})
                else:
                    assert call["index"] == len(calls) - 1
                    calls[-1]["arguments"] += call["function"]["arguments"]
    return content, calls, it.ended


def whole(text: str, *, single: bool = False) -> tuple[str | None, list[dict[str, Any]], int]:
    it = reader(single=single)
    it.keep(text, last=True)
    message = json.loads("{" + it.members() + "}")
    calls = [{"id": call["id"], **call["function"]} for call in message.get("tool_calls", ())]
    return message["content"], calls, it.ended


@pytest.mark.parametrize("width", [1, 3, 1000])
@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("hello", "hello", 0),
        (F, None, 1),
        (f"Well. {F}\n{F} So.", "Well.So.", 2),
        (f"{F} {F[:20]}", F[:20], 1),
    ],
)
def test_both_say_the_same(text: str, width: int, content: str | None, calls: int) -> None:
    told = [{"id": f"call_{n}", "name": "f", "arguments": '{"a": "é\\n"}'} for n in range(calls)]
    assert whole(text) == (content, told, calls)
    assert streamed(text, width) == (content or "", told, calls)


def test_one_call_at_most() -> None:
    told = [{"id": "call_0", "name": "f", "arguments": '{"a": "é\\n"}'}]
    for text, content in ((F + F, None), (f"{F} and {F} so", "and so")):
        assert whole(text, single=True)[1:] == (told, 1)
        assert (whole(text, single=True)[0] or "").replace(" ", "") == (content or "").replace(" ", "")
        assert streamed(text, 2, single=True)[1:] == (told, 1)


def test_a_call_that_breaks_off() -> None:
    """What was streamed of it stays a call that is not whole; a whole message has it as text."""
    assert whole(BROKEN) == (BROKEN, [], 0)
    broken = {"id": "call_0", "name": "f", "arguments": '{"a": 1'}
    assert streamed(BROKEN, 4) == (";}}</tool_call>", [broken], 0)
    content, calls, ended = streamed(BROKEN + F, 4)
    assert (content, ended) == (";}}</tool_call>", 1)
    assert calls == [broken, {"id": "call_1", "name": "f", "arguments": '{"a": "é\\n"}'}]
    content_, calls, ended = whole(BROKEN + F)
    assert (content_, [call["name"] for call in calls], ended) == (BROKEN, ["f"], 1)
