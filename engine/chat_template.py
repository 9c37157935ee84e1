"""A model's chat template: messages in, one prompt out, in sandboxed Jinja2."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import meta
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from ..errors import ConfigError, InvalidRequest
from .model_files import read_json

_FIELD = "input.chat"
_TAG = "CONTINUE_FINAL_MESSAGE_TAG "  # marks where the last message's words end; templates may trim them
_OURS = frozenset({"messages", "add_generation_prompt"})
_MAX_CHARACTERS = 1 << 24  # of a rendered prompt: a template's loops cannot fill the memory


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """What a conversation is rendered with besides its messages; the defaults are those of a plain chat.

    `tools`: definitions, as OpenAI has them. `variables`: what else the template shall see. `continue_final_message`:
    the last message is left open, to be gone on with. `add_special_tokens`: those that the tokenizer adds to a text
    come besides what the template writes.
    """

    tools: tuple[Mapping[str, Any], ...] = ()
    variables: Mapping[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False


PLAIN = ChatOptions()


class ChatTemplate:
    """A compiled template. Renders as transformers' `apply_chat_template` does; safe to share between threads."""

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        *,
        tool_source: str | None = None,
        limit: int = _MAX_CHARACTERS,
    ) -> None:
        """`special_tokens`: `bos_token`, `eos_token` and so on, for the template to use. `tool_source`: another one for
        conversations with tools, where the model has such.

        ConfigError when a source is not valid Jinja2.
        """
        self._special_tokens = dict(special_tokens)
        self._limit = limit
        self._template, variables = _compile(source)
        self._tool_template, tool_variables = (
            (self._template, variables) if tool_source is None else _compile(tool_source)
        )
        self.source = source if tool_source is None else tool_source  # that tells how tools are called
        self.takes_tools = "tools" in tool_variables
        self.variables = (variables | tool_variables) - _OURS - {"tools"} - self._special_tokens.keys()
        """What a caller may set: all names that the template looks up, but for those that have their own way in."""

    @classmethod
    def from_dir(cls, path: Path) -> "ChatTemplate | None":
        """The template of a model directory: chat_template.jinja, else that of tokenizer_config.json, else None."""
        config = read_json(path / "tokenizer_config.json") if (path / "tokenizer_config.json").is_file() else {}
        source = _source(path, config.get("chat_template"))
        if source is None:
            return None
        return cls(source, _special_tokens(config), tool_source=_tool_source(path, config.get("chat_template")))

    def render(self, messages: Sequence[Mapping[str, Any]], options: ChatOptions = PLAIN) -> str:
        """The prompt of a conversation, the assistant's turn opened at its end.

        InvalidRequest (field `input.chat`) when there is no message, or one that the template refuses.
        """
        if not messages:
            raise InvalidRequest("the chat has no messages", field=_FIELD)
        if not options.continue_final_message:
            return self._render(messages, options)
        last = messages[-1]
        text = self._render([*messages[:-1], {**last, "content": f"{last.get('content') or ''}{_TAG}"}], options)
        end = text.rfind(_TAG.strip())
        if end < 0:
            raise InvalidRequest("the chat template does not show the last message, which is to be continued",
                                 field=_FIELD)  # fmt: skip
        return text[:end] if text.startswith(_TAG, end) else text[:end].rstrip()  # else the template trims

    def _render(self, messages: Sequence[Mapping[str, Any]], options: ChatOptions) -> str:
        template = self._tool_template if options.tools else self._template
        parts: list[str] = []
        length = 0
        try:
            for part in template.generate(
                **{"documents": None, **options.variables},
                messages=[dict(message) for message in messages],
                tools=[dict(tool) for tool in options.tools] or None,
                add_generation_prompt=options.add_generation_prompt,
                **self._special_tokens,
            ):
                parts.append(part)
                length += len(part)
                if length > self._limit:
                    break
        except Exception as error:  # the template's own code: whatever it trips over is about these messages
            raise InvalidRequest(f"the chat template refuses these messages: {error}", field=_FIELD) from error
        if length > self._limit:
            raise InvalidRequest(f"the chat is longer than {self._limit} characters", field=_FIELD)
        return "".join(parts)


def _compile(source: str) -> tuple[jinja2.Template, frozenset[str]]:
    """The template, and the names that it looks up. ConfigError where it is not valid."""
    environment = _environment()
    try:
        found = meta.find_undeclared_variables(environment.parse(source))
        return environment.from_string(source), frozenset(found - environment.globals.keys())
    except (jinja2.TemplateError, RecursionError) as error:
        raise ConfigError(f"the model's chat template is not valid: {error}") from error


class _Generation(Extension):
    """`{% generation %}` marks the assistant's words, for training; here its body is rendered as it is."""

    tags = {"generation"}  # noqa: RUF012 (the attribute that Jinja2 reads)

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Namespace(Namespace):
    """Takes no underscored names, which could reach Python's own objects (as transformers has it)."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # a name may be called `self`
        attributes = dict(*args[1:], **kwargs)
        for name in attributes:
            _check_name(name)
        Namespace.__init__(args[0], attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace takes no name like {name!r}")


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["namespace"] = _Namespace
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja2's own filter escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _source(path: Path, configured: object) -> str | None:
    """A file of its own comes first; tokenizer_config.json holds one template or a list of named ones."""
    file = path / "chat_template.jinja"
    if file.is_file():
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ConfigError(f"cannot read {file}: {error}") from error
    if isinstance(configured, list):
        named = [entry for entry in configured if isinstance(entry, dict) and entry.get("name") == "default"]
        configured = named[0].get("template") if named else None
    return configured if isinstance(configured, str) else None


def _tool_source(path: Path, configured: object) -> str | None:
    """The one named `tool_use`, from where `_source` looks."""
    file = path / "additional_chat_templates" / "tool_use.jinja"
    if file.is_file():
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ConfigError(f"cannot read {file}: {error}") from error
    if (path / "chat_template.jinja").is_file() or not isinstance(configured, list):
        return None
    named = [entry for entry in configured if isinstance(entry, dict) and entry.get("name") == "tool_use"]
    source = named[0].get("template") if named else None
    return source if isinstance(source, str) else None


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """`bos_token` and the like, given as a string or as an object with `content`."""
    found: dict[str, str] = {}
    for key, value in config.items():
        content = value.get("content") if isinstance(value, dict) else value
        if key.endswith("_token") and isinstance(content, str):
            found[key] = content
    return found
