"""Hermes, Qwen 2.5 and 3, SmolLM2 and many more: <tool_call>{"name": ..., "arguments": {...}}</tool_call>."""

from typing import ClassVar

from .array_parser import ArrayParser

BEGIN, END = "<tool_call>", "</tool_call>"


class HermesParser(ArrayParser):
    """Some write an array of calls between the tags."""

    markers: ClassVar[tuple[str, ...]] = (BEGIN,)
    end: ClassVar[str] = END
