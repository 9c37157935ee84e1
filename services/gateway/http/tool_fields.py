"""`tools` and `tool_choice` of a chat: what the model may call, and whether it must."""

import re
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field

from ..tools.wish import Function, ToolWish
from .errors import HttpRefusal
from .fields import Fields

MAX_TOOLS = 128
NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_TAKES_CHOICE = "tool_choice takes 'none', 'auto', 'required', or a function that is among the tools by its name"


class _FunctionFields(Fields):
    """`function` of a tool."""

    name: str
    description: str = ""
    parameters: dict[str, Any] = Field(default_factory=dict)
    strict: bool = False


class _Tool(Fields):
    """An element of `tools`."""

    type: str
    function: Any = None


class _Named(Fields):
    """The `function` of a choice, and the elements of `allowed_tools.tools`."""

    name: str


class _Allowed(Fields):
    """`allowed_tools` of a choice."""

    mode: Literal["auto", "required"]
    tools: list[Any]


class _Choice(Fields):
    """A `tool_choice` that is an object."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {"custom": ()}
    type: str
    function: Any = None
    allowed_tools: Any = None


def read_wish(tools: list[Any], choice: Any, *, parallel: bool) -> ToolWish | None:
    """None where no function may be called. HttpRefusal names what is wrong."""
    functions = _read_functions(tools)
    if choice is None:
        choice = "auto" if functions else "none"
    if choice == "none":
        return None
    if not functions:
        raise HttpRefusal("tool_choice takes tools: send both, or neither", field="tool_choice")
    shown = tuple(function.definition for function in functions.values())
    may = tuple(functions.values())
    if choice in ("auto", "required"):
        return ToolWish(shown, may, required=choice == "required", single=not parallel)
    if not isinstance(choice, dict):
        raise HttpRefusal(_TAKES_CHOICE, field="tool_choice")
    told = _Choice.read(choice, "tool_choice.")
    if told.type == "function":
        return ToolWish(shown, (_find(functions, told.function, "tool_choice.function"),), required=True, single=True)
    if told.type != "allowed_tools":
        raise HttpRefusal(_TAKES_CHOICE, field="tool_choice.type")
    allowed = _Allowed.read(told.allowed_tools, "tool_choice.allowed_tools.")
    if not allowed.tools:
        raise HttpRefusal("allowed_tools names no tool", field="tool_choice.allowed_tools.tools")
    some = [
        _find(functions, _function(each, path), f"{path}.function")
        for each, path in _numbered(allowed.tools, "tool_choice.allowed_tools.tools")
    ]
    may = tuple({function.name: function for function in some}.values())
    return ToolWish(shown, may, required=allowed.mode == "required", single=not parallel)


def _read_functions(tools: list[Any]) -> dict[str, Function]:
    if len(tools) > MAX_TOOLS:
        raise HttpRefusal(f"{len(tools)} tools, at most {MAX_TOOLS}", field="tools")
    functions: dict[str, Function] = {}
    for value, path in _numbered(tools, "tools"):
        given = _function(value, path)
        fields = _FunctionFields.read(given, f"{path}.function.")
        if not NAME.fullmatch(fields.name):
            raise HttpRefusal(f"{path}.function.name takes 1 to 64 letters, digits, _ and -",
                              field=f"{path}.function.name")  # fmt: skip
        if fields.name in functions:
            raise HttpRefusal(f"two tools are called {fields.name!r}", field=f"{path}.function.name")
        if fields.parameters.get("type", "object") != "object":
            raise HttpRefusal("the parameters of a function are an object", field=f"{path}.function.parameters.type")
        functions[fields.name] = Function(fields.name, _definition(fields), fields.parameters, fields.strict)
    return functions


def _definition(fields: _FunctionFields) -> dict[str, Any]:
    """As chat templates know it: every member is there."""
    parameters = fields.parameters or {"type": "object", "properties": {}}
    function = {"name": fields.name, "description": fields.description, "parameters": parameters}
    return {"type": "function", "function": function}


def _function(value: Any, path: str) -> Any:
    tool = _Tool.read(value, path + ".") if _is_function(value) else None
    if tool is None:
        raise HttpRefusal(f"{path} is no function: only tools of type 'function' are supported here",
                          field=f"{path}.type")  # fmt: skip
    return tool.function


def _is_function(value: Any) -> bool:
    return not isinstance(value, dict) or value.get("type", "function") == "function"


def _find(functions: Mapping[str, Function], value: Any, path: str) -> Function:
    name = _Named.read(value, path + ".").name
    if name not in functions:
        raise HttpRefusal(_TAKES_CHOICE, field=f"{path}.name")
    return functions[name]


def _numbered(values: list[Any], path: str) -> list[tuple[Any, str]]:
    return [(value, f"{path}[{index}]") for index, value in enumerate(values)]
