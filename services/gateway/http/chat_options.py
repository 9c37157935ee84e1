"""How a conversation is put through the chat template: what is asked for, and what this model's template takes."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from pydantic import Field

from ....engine.chat_template import ChatOptions, ChatTemplate
from ..generation import ChatInput, Turn
from ..served_model import INLINE_CHARACTERS, ServedModel, characters
from ..tools.wish import ToolWish
from .errors import HttpRefusal
from .fields import Fields, Many

REASONING = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
VERBOSITY = ("low", "medium", "high")
_UNSUPPORTED = "unsupported_parameter"
_TOOL_ROLES = ("tool", "function")  # whose names are those of functions


class TemplateFields(Fields):
    """Fields of whatever takes a conversation."""

    add_generation_prompt: bool | None = None
    add_special_tokens: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    documents: Many[list[dict[str, Any]]] = Field(default_factory=list)
    reasoning_effort: str | None = None
    verbosity: str | None = None


def read_chat(fields: TemplateFields, turns: tuple[Turn, ...], wish: ToolWish | None, model: ServedModel) -> ChatInput:
    """HttpRefusal for what the model's template would not show it."""
    going_on = fields.continue_final_message
    if going_on and fields.add_generation_prompt:
        raise HttpRefusal("the last message is gone on with, or a new one begun: send one of the two as false",
                          field="add_generation_prompt")  # fmt: skip
    if going_on and "tool_calls" in turns[-1].more:
        raise HttpRefusal("a message that ends with tool calls cannot be gone on with", field="continue_final_message")
    template = model.tokenizer.template
    if template is None:
        return ChatInput(turns)  # refused for that
    if wish is not None and not template.takes_tools:
        raise HttpRefusal(
            f"the chat template of {model.name} has no place for tools: leave them out, or serve a model whose "
            "template has",
            field="tools",
            code=_UNSUPPORTED,
        )
    _check_shown(turns, template)
    options = ChatOptions(
        tools=wish.shown if wish is not None else (),
        variables=_variables(fields, template),
        add_generation_prompt=not going_on if fields.add_generation_prompt is None else fields.add_generation_prompt,
        continue_final_message=going_on,
        add_special_tokens=bool(fields.add_special_tokens),
    )
    return ChatInput(turns, options)


async def check_names(chat: ChatInput, model: ServedModel) -> None:
    """HttpRefusal for names of speakers that make no difference to the prompt: they are not dropped in silence."""
    named = [index for index, turn in enumerate(chat.messages) if _is_named(turn)]
    template = model.tokenizer.template
    if not named or template is None:
        return
    without = tuple(
        replace(turn, more={key: value for key, value in turn.more.items() if key != "name"})
        if _is_named(turn)
        else turn
        for turn in chat.messages
    )

    def shown() -> bool:
        texts = [
            template.render([turn.message() for turn in turns], chat.options) for turns in (chat.messages, without)
        ]
        return texts[0] != texts[1]

    if characters(chat) <= INLINE_CHARACTERS:
        told = shown()
    else:
        told = await asyncio.get_running_loop().run_in_executor(model.threads, shown)
    if not told:
        raise _not_shown("name", named[0])


def _is_named(turn: Turn) -> bool:
    return "name" in turn.more and turn.role not in _TOOL_ROLES


def _check_shown(turns: Sequence[Turn], template: ChatTemplate) -> None:
    for key in ("tool_calls", "reasoning_content"):
        first = next((index for index, turn in enumerate(turns) if key in turn.more), None)
        if first is not None and key not in template.source:
            raise _not_shown(key, first)


def _not_shown(key: str, index: int) -> HttpRefusal:
    return HttpRefusal(
        f"this model's chat template does not show {key}: leave it out, or write it into the content",
        field=f"messages[{index}].{key}",
        code=_UNSUPPORTED,
    )


def _variables(fields: TemplateFields, template: ChatTemplate) -> dict[str, Any]:
    """What the template sees besides. Each must be one that it looks for."""
    told = dict(fields.chat_template_kwargs)
    for name in told:
        if name not in template.variables:
            raise _no_variable(f"chat_template_kwargs.{name[:64]}", template)
    if fields.documents:
        if "documents" not in template.variables:
            raise _no_variable("documents", template)
        told["documents"] = fields.documents
    _add_effort(told, fields.reasoning_effort, template)
    _add_verbosity(told, fields.verbosity, template)
    return told


def _add_effort(told: dict[str, Any], effort: str | None, template: ChatTemplate) -> None:
    """Templates that only know `enable_thinking` take `none` for false. Where there is neither, `none` asks nothing."""
    if effort is None:
        return
    if effort not in REASONING:
        raise HttpRefusal(f"reasoning_effort takes one of {', '.join(REASONING)}", field="reasoning_effort")
    if "reasoning_effort" in template.variables:
        told.setdefault("reasoning_effort", effort)
    elif "enable_thinking" in template.variables:
        told.setdefault("enable_thinking", effort != "none")
    elif effort != "none":
        raise _no_variable("reasoning_effort", template)


def _add_verbosity(told: dict[str, Any], verbosity: str | None, template: ChatTemplate) -> None:
    if verbosity is None:
        return
    if verbosity not in VERBOSITY:
        raise HttpRefusal(f"verbosity takes one of {', '.join(VERBOSITY)}", field="verbosity")
    if "verbosity" in template.variables:
        told.setdefault("verbosity", verbosity)
    elif verbosity != "medium":
        raise _no_variable("verbosity", template)


def _no_variable(field: str, template: ChatTemplate) -> HttpRefusal:
    known = ", ".join(sorted(template.variables)[:16]) or "nothing"
    return HttpRefusal(
        f"this model's chat template does not look for {field}: leave it out (it looks for {known})",
        field=field,
        code=_UNSUPPORTED,
    )
