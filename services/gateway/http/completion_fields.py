"""What `/v1/completions` takes."""

from collections.abc import Mapping
from typing import Any, ClassVar

from ..generation import TextInput, TokenInput
from .errors import HttpRefusal
from .generation_fields import GenerationFields

MAX_CHOICES = 128  # prompts of a request times `n`


class CompletionFields(GenerationFields):
    """Plain text or tokens, one prompt or several."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **GenerationFields.unsupported,
        "prompt_embeds": (),
    }

    prompt: Any
    suffix: str = ""
    add_special_tokens: bool = True
    max_tokens: int | None = 16
    logprobs: int | None = None
    echo: bool = False
    best_of: int | None = None

    @property
    def prompt_only(self) -> bool:
        """The prompt comes back, and nothing is added to it."""
        return self.echo and self.max_tokens == 0

    def check(self) -> None:
        """HttpRefusal for fields that contradict each other."""
        self.check_plain_only()
        if self.best_of is not None and self.best_of != self.n:
            raise HttpRefusal("best_of is supported only where it equals n: leave it out", field="best_of")
        if self.suffix and self.echo:
            raise HttpRefusal("a prompt around a gap is not echoed: send suffix or echo", field="suffix")
        if self.stream and self.echo and self.logprobs is not None and self.n > 1:
            raise HttpRefusal("a stream that echoes the prompt with logprobs takes n: 1", field="n")
        if self.echo and self.logprobs is not None and self.prompt_logprobs not in (None, self.logprobs):
            raise HttpRefusal("with echo, prompt_logprobs must equal logprobs: leave it out", field="prompt_logprobs")


def read_prompts(value: Any, n: int, most: int, *, special: bool = True) -> list[TextInput | TokenInput]:
    """A text, a list of tokens, or a list of either. `n`: answers to each. `most`: of more tokens than that none is
    looked at, as they are refused later. `special`: texts get the special tokens that the tokenizer adds."""
    if isinstance(value, str):
        return [TextInput(value, special)]
    if not isinstance(value, list) or not value:
        raise HttpRefusal("prompt takes a text, token ids, or a list of either that is not empty", field="prompt")
    if type(value[0]) is int:
        return [TokenInput(_ids(value, "prompt", most))]
    if len(value) * max(1, n) > MAX_CHOICES:
        raise HttpRefusal(f"{len(value)} prompts with {n} answers each, at most {MAX_CHOICES} answers", field="prompt")
    return [_read(each, f"prompt[{index}]", most, special) for index, each in enumerate(value)]


def _read(value: Any, field: str, most: int, special: bool) -> TextInput | TokenInput:
    if isinstance(value, str):
        return TextInput(value, special)
    if isinstance(value, list):
        return TokenInput(_ids(value, field, most))
    raise HttpRefusal(f"{field} is neither a text nor a list of token ids", field=field, code="invalid_type")


def _ids(value: list[Any], field: str, most: int) -> list[int]:
    if len(value) <= most and not all(type(token) is int for token in value):
        raise HttpRefusal(f"{field} holds something that is no token id", field=field, code="invalid_type")
    return value
