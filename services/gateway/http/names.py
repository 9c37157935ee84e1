"""What a client of the OpenAI API calls the fields that the gateway names in its own words."""

from collections.abc import Mapping
from types import MappingProxyType

_EXACT = {
    "input.chat": "messages",
    "stopping.token_ids": "stop_token_ids",
    "stopping.strings": "stop",
    "stopping.include_stop": "include_stop_str_in_output",
}
_PREFIXES = {
    "input.chat.messages": "messages",
    "input.token_ids.ids": "prompt",
    "input.token_ids": "prompt",
    "input.text": "prompt",
    "stopping.token_ids": "stop_token_ids",
    "stopping.strings": "stop",
}


def openai_name(field: str, *, chat: bool = False, renamed: Mapping[str, str] = MappingProxyType({})) -> str:
    """`sampling.top_p` is top_p, `input.chat.messages[3].role` messages[3].role. Other names are OpenAI's already.

    `chat`: the request is one. `renamed`: what this request calls fields that begin so.
    """
    for prefix, name in renamed.items():
        if field.startswith(prefix):
            return name + field[len(prefix) :]
    if field in _EXACT:
        return _EXACT[field]
    if field == "input":
        return "messages" if chat else "prompt"
    for prefix, name in _PREFIXES.items():
        if field.startswith(prefix):
            if chat and name == "prompt":
                return "messages"  # they were tokenized here
            return name + field[len(prefix) :]
    for prefix in ("sampling.", "stopping."):
        if field.startswith(prefix):
            return field[len(prefix) :]
    if field == "logprobs" and chat:
        return "top_logprobs"
    return field
