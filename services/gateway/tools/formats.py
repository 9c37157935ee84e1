"""The forms in which models write calls of tools, by name, and which of them a chat template asks for."""

import secrets
import string
from collections.abc import Mapping
from dataclasses import dataclass

from ....engine.chat_template import ChatTemplate
from . import hermes, llama, mistral, phi4
from .pythonic import PythonicParser
from .tool_parser import ToolParser

_ALPHABET = string.ascii_letters + string.digits


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """`tokens`: what the parser and the grammar look for, which a tokenizer may have as special tokens.
    `id_characters`: of a call's id; 0: as OpenAI's."""

    name: str
    parser: type[ToolParser]
    tokens: tuple[str, ...]
    id_characters: int = 0

    def new_id(self) -> str:
        """Names a call."""
        if self.id_characters:
            return "".join(secrets.choice(_ALPHABET) for _ in range(self.id_characters))
        return f"call_{secrets.token_hex(12)}"


FORMATS: Mapping[str, ToolFormat] = {
    each.name: each
    for each in (
        ToolFormat("hermes", hermes.HermesParser, (hermes.BEGIN, hermes.END)),
        ToolFormat("llama", llama.LlamaParser, (llama.TAG,)),
        ToolFormat(  # its templates take no other ids
            "mistral", mistral.MistralParser, (mistral.BEGIN, mistral.ID, mistral.ARGUMENTS), id_characters=9
        ),
        ToolFormat("phi4", phi4.Phi4Parser, (phi4.BEGIN, phi4.END)),
        ToolFormat("pythonic", PythonicParser, PythonicParser.markers),
    )
}
_SIGNS = (  # the first that a template holds
    ("<function=", None),  # Qwen3-Coder's tags
    ("<tool_call>", "hermes"),
    ("[TOOL_CALLS]", "mistral"),
    ("<|tool_call|>", "phi4"),
    ("functools[", "phi4"),
    ("func_name1(", "pythonic"),
    ("<|python_start|>", "pythonic"),
    ("<|python_tag|>", "llama"),
    ('"parameters": dictionary', "llama"),
)


def find_format(template: str) -> ToolFormat | None:
    """How the models of this chat template write calls; None where it does not tell."""
    name = next((name for sign, name in _SIGNS if sign in template), None)
    return FORMATS[name] if name is not None else None


def choose_format(name: str, template: ChatTemplate | None) -> ToolFormat | None:
    """`name`: of a format; `auto`: what the template tells; `none`. None where no tools can be called."""
    if name != "auto":
        return FORMATS.get(name)
    return find_format(template.source) if template is not None and template.takes_tools else None
