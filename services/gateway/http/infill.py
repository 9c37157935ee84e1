"""`suffix`: text for a gap, by the marks that models of code were trained with."""

from collections.abc import Sequence
from typing import NamedTuple

from ..generation import TextInput, TokenInput
from ..served_model import ServedModel
from .errors import HttpRefusal


class Marks(NamedTuple):
    """Tokens that stand before the prefix, before the suffix, and at the end."""

    prefix: str
    suffix: str
    middle: str


KNOWN = (
    Marks("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen 2.5, CodeGemma
    Marks("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, SmolLM
    Marks("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek
)


def find_marks(model: ServedModel) -> Marks | None:
    """Those that the tokenizer has; None: the model cannot fill gaps."""
    return next((marks for marks in KNOWN if all(model.tokenizer.token_id(mark) is not None for mark in marks)), None)


def around_gap(
    sources: Sequence[TextInput | TokenInput], suffix: str, model: ServedModel
) -> list[TextInput | TokenInput]:
    """Each prompt with the suffix behind the gap. HttpRefusal where the model has no marks, or a prompt is no text."""
    if not suffix:
        return list(sources)
    marks = find_marks(model)
    if marks is None:
        raise HttpRefusal(
            f"{model.name} has no tokens for gaps in a text: leave suffix out, or serve a model of code that has",
            field="suffix",
            code="unsupported_parameter",
        )
    filled: list[TextInput | TokenInput] = []
    for source in sources:
        if isinstance(source, TokenInput):
            raise HttpRefusal("suffix takes prompts of text", field="suffix")
        text = f"{marks.prefix}{source.text}{marks.suffix}{suffix}{marks.middle}"
        filled.append(TextInput(text, source.add_special_tokens))
    return filled
