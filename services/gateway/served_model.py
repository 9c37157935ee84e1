"""The model that a gateway serves: its names, limits and tokenizer. No weights, no torch."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from ...engine.chat_template import PLAIN, ChatOptions, ChatTemplate
from ...errors import InvalidRequest, ModelNotFound
from .generation import ChatInput, GenerationRequest, Input, TextInput, TokenInput
from .tools.formats import ToolFormat

INLINE_CHARACTERS = 2048  # tokenizing more would hold up other streams for a millisecond


class TextTokenizer(Protocol):
    """What is used of `engine.tokenizer.Tokenizer`."""

    @property
    def vocab_size(self) -> int:
        """Number of ids."""

    @property
    def has_chat_template(self) -> bool:
        """Whether `encode_chat` works."""

    def encode(self, text: str) -> list[int]:
        """Ids of plain text."""

    def encode_plain(self, text: str) -> list[int]:
        """Ids of a piece of text, without a prompt's special tokens."""

    @property
    def template(self) -> ChatTemplate | None:
        """How conversations become text."""

    def token_id(self, token: str) -> int | None:
        """Of a token by its name."""

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], options: ChatOptions = PLAIN) -> list[int]:
        """Ids of a conversation; InvalidRequest where the template refuses it."""

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """The text of tokens."""

    def token_bytes(self, token_id: int) -> bytes:
        """A token's share of the text."""

    def token_text(self, token_id: int) -> str:
        """The same as text."""


class TextStream(Protocol):
    """What is used of `engine.detokenizer.Detokenizer`."""

    def push(self, token_id: int) -> str:
        """Text that became certain."""

    def flush(self) -> str:
        """The rest."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """Sizes in tokens; `max_input` and `max_output` are at most the context."""

    name: str
    context_length: int
    max_input: int
    max_output: int
    vocabulary_size: int
    eos_token_ids: tuple[int, ...]
    longest_token: int  # characters
    tokenizer: TextTokenizer
    detokenizer: Callable[..., TextStream]
    threads: ThreadPoolExecutor  # for tokenizing long texts
    special_token_ids: tuple[int, ...] = ()
    folder: Path = Path()  # of its files
    tool_format: ToolFormat | None = None  # in which it writes calls of tools; None: nobody knows

    @property
    def max_characters(self) -> int:
        """A text that is longer can never fit."""
        return self.max_input * self.longest_token

    def check_name(self, name: str) -> None:
        """ModelNotFound where another model is asked for; the empty name is ours."""
        if name not in ("", self.name):
            raise ModelNotFound(f"model {name[:128]!r} is not served here; {self.name!r} is", field="model")

    async def prompt_ids(self, source: Input) -> list[int]:
        """The ids that will run; long texts are tokenized on a thread. InvalidRequest where there are none."""
        if isinstance(source, TokenInput):
            return list(source.ids)
        if characters(source) <= INLINE_CHARACTERS:
            ids = self._encode(source)
        else:
            ids = await asyncio.get_running_loop().run_in_executor(self.threads, self._encode, source)
        if not ids:
            raise InvalidRequest("the input has no tokens", field="input")
        return ids

    async def token_texts(self, ids: Sequence[int]) -> list[str]:
        """The text of each token; many on a thread."""
        if len(ids) <= INLINE_CHARACTERS:
            return self._texts(ids)
        return await asyncio.get_running_loop().run_in_executor(self.threads, self._texts, ids)

    async def text(self, ids: Sequence[int], *, skip_special: bool) -> str:
        """The text of tokens; of many on a thread."""
        decode = partial(self.tokenizer.decode, ids, skip_special=skip_special)
        if len(ids) <= INLINE_CHARACTERS:
            return decode()
        return await asyncio.get_running_loop().run_in_executor(self.threads, decode)

    def text_stream(
        self, *, skip_special: bool = True, shown: Sequence[str] = (), verbatim: bool = False
    ) -> TextStream:
        """Of an answer. `skip_special`: special tokens are no text, but for those that `shown` names. `verbatim`: the
        tokens' bytes and nothing else, which is what a constraint speaks of."""
        ids = self.special_ids(shown)
        options: dict[str, Any] = {"skip_special": skip_special, "shown": ids} if ids or not skip_special else {}
        return self.detokenizer(**options, **({"strip_space": False} if verbatim else {}))

    def stop_texts(self, request: GenerationRequest) -> dict[int, str]:
        """Of each stop token, what its text stream leaves out: the whole text of a special one, else nothing."""
        hidden = set(self.special_token_ids) - self.special_ids(request.shown_tokens)
        if not request.skip_special_tokens:
            hidden = set()
        return {
            token: self.tokenizer.token_text(token) if token in hidden else "" for token in request.stopping.token_ids
        }

    def special_id(self, name: str) -> int | None:
        """Of a special token by its name; None where there is none."""
        return next(iter(self.special_ids((name,))), None)

    def special_ids(self, names: Sequence[str]) -> frozenset[int]:
        """Of those among these tokens that there are, and that are special."""
        found = (self.tokenizer.token_id(name) for name in names)
        return frozenset(token for token in found if token in self.special_token_ids)

    def _texts(self, ids: Sequence[int]) -> list[str]:
        return [self.tokenizer.token_text(token) for token in ids]

    def _encode(self, source: TextInput | ChatInput) -> list[int]:
        if isinstance(source, TextInput):
            encode = self.tokenizer.encode if source.add_special_tokens else self.tokenizer.encode_plain
            return encode(source.text)
        return self.tokenizer.encode_chat([turn.message() for turn in source.messages], source.options)


def characters(source: Input) -> int:
    """Length of the texts of an input; 0 for token ids."""
    if isinstance(source, TextInput):
        return len(source.text)
    if isinstance(source, ChatInput):
        told = sum(len(turn.role) + len(turn.content) + _length(turn.more) for turn in source.messages)
        return told + _length(source.options.tools) + _length(source.options.variables)
    return 0


def _length(value: Any) -> int:
    """Characters of all texts in a value of JSON, and one for everything else."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(len(key) + _length(inner) for key, inner in value.items())
    if isinstance(value, (list, tuple)):
        return sum(map(_length, value))
    return 1


def longest_token(tokenizer: TextTokenizer) -> int:
    """Characters of the longest token, at least 1."""
    return max((len(tokenizer.token_text(token)) for token in range(tokenizer.vocab_size)), default=1) or 1
