"""What `/v1/chat/completions` takes."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field

from ..tools.wish import ToolWish
from .chat_options import TemplateFields
from .errors import HttpRefusal
from .fields import Fields
from .generation_fields import GenerationFields
from .tool_fields import read_wish


class _Prediction(Fields):
    """`prediction`."""

    type: Literal["content"]
    content: Any


class ChatFields(TemplateFields, GenerationFields):
    """A conversation, put through the model's chat template."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **GenerationFields.unsupported,
        # OpenAI's
        "audio": (),
        "function_call": ("none",),
        "functions": ([],),
        "modalities": (["text"],),
        "web_search_options": (),
        # of other servers
        "best_of": (1,),
        "chat_template": (),
        "echo": (False,),
        "include_reasoning": (False,),
        "mm_processor_kwargs": ({},),
    }
    remedies: ClassVar[Mapping[str, str]] = {
        **GenerationFields.remedies,
        "chat_template": "the model's own is used; /v1/completions takes a text that was made elsewhere",
        "echo": "leave it out; continue_final_message goes on with the last message",
        "function_call": "send tool_choice",
        "functions": "send tools, each {'type': 'function', 'function': ...}",
        "web_search_options": "leave it out; what a search tool of yours finds goes into the messages",
    }

    messages: Any
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    prediction: dict[str, Any] | None = None
    # what it may call
    tools: list[Any] = Field(default_factory=list)
    tool_choice: Any = None
    parallel_tool_calls: bool = True

    @property
    def limit(self) -> int | None:
        """The most tokens to generate; None: as many as fit."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def check(self) -> None:
        """HttpRefusal for fields that contradict each other."""
        self.check_plain_only()
        self.check_prediction()
        if self.top_logprobs is not None and not self.logprobs:
            raise HttpRefusal("top_logprobs takes logprobs: true", field="top_logprobs")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise HttpRefusal("max_tokens is the old name of max_completion_tokens: send one", field="max_tokens")

    def check_prediction(self) -> None:
        """HttpRefusal for what is none. It could speed an answer up, and changes nothing about it: here, nothing."""
        if self.prediction is not None:
            content = _Prediction.read(self.prediction, "prediction.").content
            if not isinstance(content, str | list):
                raise HttpRefusal("prediction.content takes a text, or a list of parts", field="prediction.content")

    def wish(self) -> ToolWish | None:
        """What may be called; None: nothing. HttpRefusal."""
        return read_wish(self.tools, self.tool_choice, parallel=self.parallel_tool_calls)
