"""Text to token ids and back, on the `tokenizers` library alone. No torch: the gateway runs it."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from ..errors import ConfigError, InvalidRequest
from .chat_template import PLAIN, ChatOptions, ChatTemplate
from .model_files import read_json
from .token_texts import TokenTexts

_LONG = 1024  # characters; from here on the library's batch call is used, which frees the interpreter for other threads


class Tokenizer:
    """A model's tokenizer and chat template. Nothing in it changes: threads may share it."""

    def __init__(
        self, tokenizer: tokenizers.Tokenizer, *, vocab_size: int | None = None, template: ChatTemplate | None = None
    ) -> None:
        """`vocab_size`: the model's, which may be larger than the tokenizer's; None: the tokenizer's."""
        tokenizer.no_truncation()  # a file may ask for either; a request's length is judged elsewhere
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._template = template
        self.vocab_size = vocab_size or max(tokenizer.get_vocab().values(), default=-1) + 1
        self.texts = TokenTexts(tokenizer, json.loads(tokenizer.to_str())["decoder"])

    @classmethod
    def from_dir(cls, path: Path) -> "Tokenizer":
        """Reads tokenizer.json, tokenizer_config.json, config.json's vocab_size. ConfigError when unusable."""
        file = path / "tokenizer.json"
        try:
            tokenizer = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises plain Exception
            raise ConfigError(f"cannot use {file}: {error}") from error
        config = read_json(path / "config.json") if (path / "config.json").is_file() else {}
        size = config.get("vocab_size")
        if size is not None and (type(size) is not int or size < 1):
            raise ConfigError(f"{path / 'config.json'}: vocab_size is {size!r}, not a positive number")
        return cls(tokenizer, vocab_size=size, template=ChatTemplate.from_dir(path))

    @property
    def has_chat_template(self) -> bool:
        """Whether `encode_chat` can be used."""
        return self._template is not None

    @property
    def template(self) -> ChatTemplate | None:
        """How conversations become text."""
        return self._template

    @property
    def special_ids(self) -> frozenset[int]:
        """The special tokens: ends of text, roles, padding."""
        return self.texts.special

    def encode(self, text: str) -> list[int]:
        """A prompt's tokens, with the special tokens that the tokenizer's post-processor adds.

        InvalidRequest (field `input.text`) for text that is no valid Unicode. Takes about 0.5 s a megabyte: give long
        texts to a thread; other threads go on meanwhile.
        """
        return self._encode(text, field="input.text", add_special_tokens=True)

    def encode_plain(self, text: str) -> list[int]:
        """As `encode`, without special tokens: for a piece of a text rather than a prompt."""
        return self._encode(text, field="text", add_special_tokens=False)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], options: ChatOptions = PLAIN) -> list[int]:
        """A conversation's tokens, by the chat template, which writes the special tokens itself.

        `messages`: each with `role` and `content`. InvalidRequest (field `input.chat`) when the model has no
        template, or it refuses the messages.
        """
        if self._template is None:
            raise InvalidRequest("this model has no chat template: send text", field="input.chat")
        text = self._template.render(messages, options)
        return self._encode(text, field="input.chat", add_special_tokens=options.add_special_tokens)

    def token_id(self, token: str) -> int | None:
        """Of a token by its name, such as <|im_end|>; None where there is none."""
        return self._tokenizer.token_to_id(token)

    def check_ids(self, ids: Sequence[int], *, field: str = "input.token_ids") -> None:
        """InvalidRequest that names the first id outside of the vocabulary, if there is one."""
        for index, token_id in enumerate(ids):
            if not 0 <= token_id < self.vocab_size:
                raise InvalidRequest(
                    f"token id {token_id} at index {index} is outside of the vocabulary of {self.vocab_size}",
                    field=field,
                )

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """The text of tokens. U+FFFD stands for bytes that make no character. InvalidRequest as `check_ids`."""
        self.check_ids(ids)
        return self._tokenizer.decode(list(ids), skip_special_tokens=skip_special)

    def token_bytes(self, token_id: int) -> bytes:
        """One token's share of the text, special tokens included; it may be a part of a character."""
        self.check_ids([token_id])
        return self.texts[token_id].raw

    def token_text(self, token_id: int) -> str:
        """`token_bytes` as text, with U+FFFD for parts of characters; the leading space of a word is kept."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def _encode(self, text: str, *, field: str, add_special_tokens: bool) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequest(f"a lone surrogate stands at character {error.start}", field=field) from error
        try:
            if len(text) < _LONG:
                return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
            return self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        except Exception as error:  # the library raises plain Exception, for instance for a word without <unk>
            raise InvalidRequest(f"the text cannot be tokenized: {error}", field=field) from error
