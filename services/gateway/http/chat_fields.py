"""What `/v1/chat/completions` takes."""

from collections.abc import Mapping
from typing import Any, ClassVar

from ..generation import ChatInput, Turn
from ..validation import check_messages
from .errors import HttpRefusal
from .fields import Fields
from .generation_fields import GenerationFields


class ChatFields(GenerationFields):
    """A conversation, put through the model's chat template."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **GenerationFields.unsupported,
        # OpenAI's
        "audio": (),
        "function_call": ("none",),
        "functions": ([],),
        "modalities": (["text"],),
        "parallel_tool_calls": (True, False),
        "reasoning_effort": ("none",),
        "tool_choice": ("none",),
        "tools": ([],),
        "verbosity": ("medium",),
        "web_search_options": (),
        # of other servers
        "add_generation_prompt": (True,),
        "add_special_tokens": (False,),
        "best_of": (1,),
        "chat_template": (),
        "chat_template_kwargs": ({},),
        "continue_final_message": (False,),
        "documents": ([],),
        "echo": (False,),
        "include_reasoning": (False,),
        "mm_processor_kwargs": ({},),
    }

    messages: Any
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None

    @property
    def limit(self) -> int | None:
        """The most tokens to generate; None: as many as fit."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def check(self) -> None:
        """HttpRefusal for fields that contradict each other."""
        self.check_plain_only()
        if self.top_logprobs is not None and not self.logprobs:
            raise HttpRefusal("top_logprobs takes logprobs: true", field="top_logprobs")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise HttpRefusal("max_tokens is the old name of max_completion_tokens: send one", field="max_tokens")


class _Message(Fields):
    """One turn."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "audio": (),
        "function_call": (),
        "name": (),
        "reasoning_content": ("",),
        "refusal": (),
        "tool_call_id": (),
        "tool_calls": ([],),
    }
    role: str
    content: Any


class _Part(Fields):
    """A part of a turn's content."""

    type: str
    text: str = ""


def read_messages(value: Any) -> ChatInput:
    """Turns of text. Parts of a turn are joined by line ends; `developer` is the newer name of `system`."""
    if not isinstance(value, list):
        raise HttpRefusal("messages takes a list of messages", field="messages", code="invalid_type")
    check_messages(len(value))
    return ChatInput(tuple(_turn(message, f"messages[{index}]") for index, message in enumerate(value)))


def _turn(value: Any, path: str) -> Turn:
    message = _Message.read(value, path + ".")
    role = "system" if message.role == "developer" else message.role
    if isinstance(message.content, str):
        return Turn(role, message.content)
    if not isinstance(message.content, list):
        raise HttpRefusal(f"{path}.content takes a text, or a list of parts", field=f"{path}.content")
    parts = enumerate(message.content)
    return Turn(role, "\n".join(_text(part, f"{path}.content[{index}]") for index, part in parts))


def _text(value: Any, path: str) -> str:
    if isinstance(value, dict) and value.get("type") not in ("text", None):
        shown = str(value["type"])[:32]
        raise HttpRefusal(f"{path} is {shown!r}: only parts of text are supported here", field=f"{path}.type")
    return _Part.read(value, path + ".").text
