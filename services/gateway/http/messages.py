"""`messages` of a chat, as the model's chat template takes them."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from pydantic_core import from_json

from ..generation import Turn
from ..validation import check_messages
from .errors import HttpRefusal
from .fields import Fields

MAX_CALLS = 128  # in a message


class _Message(Fields):
    """One turn."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {"audio": (), "function_call": ()}
    remedies: ClassVar[Mapping[str, str]] = {"function_call": "send tool_calls"}
    role: str
    content: Any = None
    name: str | None = None
    tool_calls: list[Any] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None


class _Part(Fields):
    """A part of a turn's content."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {"prompt_cache_breakpoint": ()}
    remedies: ClassVar[Mapping[str, str]] = {
        "prompt_cache_breakpoint": "leave it out, every beginning of a prompt is cached that there is room for"
    }
    type: str
    text: str = ""
    refusal: str = ""


class _Call(Fields):
    """An element of `tool_calls`."""

    id: str = ""
    type: str = "function"
    function: Any
    index: int | None = None  # of a chunk: clients send what they were sent


class _CalledFunction(Fields):
    """Its `function`."""

    name: str
    arguments: str = ""


def read_messages(value: Any) -> tuple[Turn, ...]:
    """Turns of text. Parts of a turn are joined by line ends; `developer` is the newer name of `system`. A tool's
    answer gets the name of the function, which templates may want, from the call."""
    if not isinstance(value, list):
        raise HttpRefusal("messages takes a list of messages", field="messages", code="invalid_type")
    check_messages(len(value))
    called: dict[str, str] = {}  # names, by id
    turns = []
    for index, message in enumerate(value):
        turn = _turn(message, f"messages[{index}]", called)
        called.update((call["id"], call["function"]["name"]) for call in turn.more.get("tool_calls", ()))
        turns.append(turn)
    return tuple(turns)


def _turn(value: Any, path: str, called: Mapping[str, str]) -> Turn:
    message = _Message.read(value, path + ".")
    role = "system" if message.role == "developer" else message.role
    more: dict[str, Any] = {}
    if message.tool_calls:
        more["tool_calls"] = _calls(message.tool_calls, f"{path}.tool_calls")
    if message.tool_call_id:
        more["tool_call_id"] = message.tool_call_id
    name = message.name or (called.get(message.tool_call_id or "") if role == "tool" else None)
    if name:
        more["name"] = name
    if message.reasoning_content:
        more["reasoning_content"] = message.reasoning_content
    return Turn(role, _content(message, path), more)


def _content(message: _Message, path: str) -> str:
    content = message.content
    if content is None and (message.refusal or message.tool_calls):
        return message.refusal or ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise HttpRefusal(f"{path}.content takes a text, or a list of parts", field=f"{path}.content")
    return "\n".join(_text(part, f"{path}.content[{index}]") for index, part in enumerate(content))


def _text(value: Any, path: str) -> str:
    if isinstance(value, dict) and value.get("type") not in ("text", "refusal", None):
        shown = str(value["type"])[:32]
        raise HttpRefusal(f"{path} is {shown!r}: only parts of text are supported here", field=f"{path}.type")
    part = _Part.read(value, path + ".")
    return part.text if part.type == "text" else part.refusal


def _calls(values: Sequence[Any], path: str) -> list[dict[str, Any]]:
    """As templates know them: arguments are an object, where they can be read as one."""
    if len(values) > MAX_CALLS:
        raise HttpRefusal(f"{len(values)} calls in a message, at most {MAX_CALLS}", field=path)
    calls = []
    for index, value in enumerate(values):
        at = f"{path}[{index}]"
        call = _Call.read(value, at + ".")
        if call.type != "function":
            raise HttpRefusal(f"{at} is no call of a function", field=f"{at}.type")
        function = _CalledFunction.read(call.function, at + ".function.")
        told = {"name": function.name, "arguments": _arguments(function.arguments)}
        calls.append({"id": call.id, "type": "function", "function": told})
    return calls


def _arguments(text: str) -> Any:
    if not text:
        return {}
    try:
        value = from_json(text, allow_inf_nan=False)
    except ValueError:
        return text  # as a model wrote it that fell out of JSON: it goes back as it came
    return value if isinstance(value, dict) else text
