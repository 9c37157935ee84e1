"""Our tokenizer against transformers' on texts of every kind."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ConfigError, TwostrokeError
from .reference import import_transformers
from .tokenizer import Tokenizer

TEXTS: Mapping[str, str] = {
    "English": "The quick brown fox can't jump over 12 lazy dogs; it's 3.14159 o'clock, isn't it?",
    "Chinese": "今天天气很好，我们一起去公园吧！机器学习是人工智能的一个分支。",
    "emoji": "🎉 Party 👨‍👩‍👧‍👦 at the 🏖️! ☀️🇫🇷🚀🚀 e\u0301 é",
    "code": 'def f(x: int) -> str:\n    return f"{x:>10}"  # tab:\there\n\n\nfor i in range(100): print(i**2)\n',
    "whitespace": "  two  before, three   inside, a tab\t, trailing   \n\n \n\t\n   1 22  333   ",
    "empty": "",
}
_CHAT = (("user", "Why is the sky blue?"), ("assistant", "Rayleigh scattering. 🌈"), ("user", "再说一遍"))


@dataclass(frozen=True, slots=True)
class TextCheck:
    """One text, to tokens and back."""

    name: str
    tokens: int
    lossless: bool  # the text came back as it was; a tokenizer that normalises need not do that
    difference: str  # from transformers; empty: none

    @property
    def ok(self) -> bool:
        """Whether both tokenizers agree."""
        return not self.difference


def check_tokenizer(ours: Path, original: Path) -> list[TextCheck]:
    """Encodes and decodes the texts with both. Raises ConfigError where one cannot be loaded."""
    tokenizer = Tokenizer.from_dir(ours)
    try:
        reference = import_transformers().AutoTokenizer.from_pretrained(original, local_files_only=True)
    except (OSError, ValueError, ImportError, KeyError) as error:
        raise ConfigError(f"transformers cannot load the tokenizer of {original}: {error}", field="model") from error
    specials = "".join(reference.all_special_tokens)
    texts = {**TEXTS, "specials": f"{specials}text {specials} text"}
    checks = [_text(name, text, tokenizer, reference) for name, text in texts.items()]
    if tokenizer.has_chat_template or getattr(reference, "chat_template", None):
        checks.append(_chat(tokenizer, reference))
    return checks


def _text(name: str, text: str, ours: Tokenizer, theirs: Any) -> TextCheck:
    expected: list[int] = theirs(text)["input_ids"]
    ids = ours.encode(text)
    difference = "".join(_differences(ids, expected, ours, theirs))
    return TextCheck(name, len(ids), ours.decode(ids, skip_special=name != "specials") == text, difference)


def _differences(ids: list[int], expected: list[int], ours: Tokenizer, theirs: Any) -> Iterator[str]:
    """The first thing in which they differ."""
    if ids != expected:
        at = next(
            (i for i, (a, b) in enumerate(zip(ids, expected, strict=False)) if a != b), min(len(ids), len(expected))
        )
        yield f"token {at} is {ids[at : at + 3]}, not {expected[at : at + 3]} ({len(ids)} and {len(expected)} tokens)"
        return
    for skip in (True, False):
        text = ours.decode(ids, skip_special=skip)
        other = theirs.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
        if text != other:
            yield f"decoded{' without specials' if skip else ''} to {text!r}, not {other!r}"
            return


def _chat(ours: Tokenizer, theirs: Any) -> TextCheck:
    messages = [{"role": role, "content": content} for role, content in _CHAT]
    try:
        ids = ours.encode_chat(messages)
        expected = theirs.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
    except (TwostrokeError, ValueError) as error:
        return TextCheck("chat template", 0, True, str(error))
    return TextCheck("chat template", len(ids), True, "".join(_differences(ids, expected, ours, theirs)))
