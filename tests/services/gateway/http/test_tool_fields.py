"""`tools`, `tool_choice`, `parallel_tool_calls`: who may be called, and who must; what is wrong is named."""

from typing import Any

import pytest

from twostroke.services.gateway.http.errors import HttpRefusal
from twostroke.services.gateway.http.tool_fields import MAX_TOOLS, read_wish
from twostroke.services.gateway.tools.wish import ToolWish

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


def tool(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **more}}


TOOLS = [tool("f", parameters=SCHEMA, description="Does f.", strict=True), tool("g")]


def wish(choice: Any = None, tools: list[Any] = TOOLS, *, parallel: bool = True) -> ToolWish | None:
    return read_wish(tools, choice, parallel=parallel)


def wished(choice: Any = None, **more: Any) -> ToolWish:
    told = wish(choice, **more)
    assert told is not None
    return told


def named(name: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def allowed(mode: str, *names: str) -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [tool(name) for name in names]}}


def test_no_tools() -> None:
    assert wish(tools=[]) is None
    assert wish("none", tools=[]) is None
    assert wish("none") is None


def test_functions_as_templates_and_grammars_take_them() -> None:
    told = wished()
    f, g = told.functions
    assert (f.name, f.parameters, f.strict) == ("f", SCHEMA, True)
    assert (g.name, g.parameters, g.strict) == ("g", {}, False)
    nothing = {"type": "object", "properties": {}}
    assert told.shown == (
        {"type": "function", "function": {"name": "f", "description": "Does f.", "parameters": SCHEMA}},
        {"type": "function", "function": {"name": "g", "description": "", "parameters": nothing}},
    )


@pytest.mark.parametrize(
    ("choice", "parallel", "names", "required", "single"),
    [
        (None, True, "fg", False, False),
        ("auto", False, "fg", False, True),
        ("required", True, "fg", True, False),
        ("required", False, "fg", True, True),
        (named("g"), True, "g", True, True),
        (allowed("auto", "f"), True, "f", False, False),
        (allowed("required", "g", "f", "g"), True, "fg", True, False),
    ],
)
def test_choices(choice: Any, parallel: bool, names: str, required: bool, single: bool) -> None:
    told = wished(choice, parallel=parallel)
    assert told.names == frozenset(names)
    assert (told.required, told.single) == (required, single)
    assert len(told.shown) == 2  # whatever may be called, the model knows all


def test_who_is_held_to_it() -> None:
    plain = [tool("f"), tool("g")]
    assert not wished(tools=plain).constrained
    assert wished().constrained  # a strict function
    assert wished("required", tools=plain).constrained
    assert wished(tools=plain, parallel=False).constrained
    assert wished(allowed("auto", "f"), tools=plain).constrained


@pytest.mark.parametrize(
    ("tools", "choice", "field"),
    [
        ([5], None, "tools[0]"),
        ([{}], None, "tools[0].type"),
        ([{"type": "function"}], None, "tools[0].function"),
        ([{"type": "custom", "custom": {"name": "x"}}], None, "tools[0].type"),
        ([tool("f"), tool("")], None, "tools[1].function.name"),
        ([tool("a b")], None, "tools[0].function.name"),
        ([tool("x" * 65)], None, "tools[0].function.name"),
        ([tool("f"), tool("f")], None, "tools[1].function.name"),
        ([tool("f", parameters=[])], None, "tools[0].function.parameters"),
        ([tool("f", parameters={"type": "array"})], None, "tools[0].function.parameters.type"),
        ([tool("f", strict="yes")], None, "tools[0].function.strict"),
        ([tool("f", returns={})], None, "tools[0].function.returns"),
        ([tool(f"f{index}") for index in range(MAX_TOOLS + 1)], None, "tools"),
        ([], "auto", "tool_choice"),
        ([], "required", "tool_choice"),
        (TOOLS, "any", "tool_choice"),
        (TOOLS, 5, "tool_choice"),
        (TOOLS, {"type": "custom", "custom": {"name": "f"}}, "tool_choice.custom"),
        (TOOLS, {"type": "web_search"}, "tool_choice.type"),
        (TOOLS, named("h"), "tool_choice.function.name"),
        (TOOLS, {"type": "function"}, "tool_choice.function"),
        (TOOLS, allowed("auto"), "tool_choice.allowed_tools.tools"),
        (TOOLS, allowed("auto", "f", "h"), "tool_choice.allowed_tools.tools[1].function.name"),
        (TOOLS, allowed("never", "f"), "tool_choice.allowed_tools.mode"),
    ],
)
def test_what_is_wrong_is_named(tools: list[Any], choice: Any, field: str) -> None:
    with pytest.raises(HttpRefusal) as caught:
        wish(choice, tools=tools)
    assert caught.value.field == field
