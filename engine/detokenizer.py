"""Tokens to text as they come, so that every character is whole."""

import codecs
from collections.abc import Collection
from typing import Protocol

from .token_texts import Joining, TokenText, TokenTexts
from .tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"
_MAX_RUN = 16  # byte tokens held back: 4 to 5 characters
_MAX_HELD = 8  # tokens held back by a decoder that is asked again each time


class Detokenizer:
    """The text of one output. What the pushes and the flush return, joined, is `Tokenizer.decode` of all the tokens.

    Constant time a token. Held back is only what may change: an unfinished character (at most 3 bytes, or at most 16
    byte tokens for vocabularies with byte fallback, whose decoder judges a run of bytes as a whole).
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special: bool = True,
        shown: Collection[int] = (),
        strip_space: bool = True,
    ) -> None:
        """`skip_special`: special tokens, such as the end of text, add nothing, but for those that are `shown`.
        `strip_space`: the space that SentencePiece puts before a text is left out; without it the text is the tokens'
        bytes."""
        self._texts: TokenTexts = tokenizer.texts
        self._hidden = tokenizer.special_ids.difference(shown) if skip_special else frozenset[int]()
        self._joiner: _Joiner
        if self._texts.joining is Joining.BYTE_LEVEL:
            self._joiner = _Bytes()
        elif self._texts.joining is Joining.BYTE_FALLBACK:
            self._joiner = _ByteRuns(strip_space and self._texts.strips_space)
        else:
            self._joiner = _Window(tokenizer)

    def push(self, token_id: int) -> str:
        """Adds a token; returns the text that became certain with it, possibly none."""
        text = self._texts[token_id]
        if text.special and token_id in self._hidden:
            return ""
        return self._joiner.push(token_id, text)

    def flush(self) -> str:
        """The end of the text: what was held back, with U+FFFD for characters that stay unfinished."""
        return self._joiner.flush()


class _Joiner(Protocol):
    def push(self, token_id: int, text: TokenText) -> str: ...

    def flush(self) -> str: ...


class _Bytes:
    """Byte-level vocabularies: the text is the tokens' bytes, read as UTF-8."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int, text: TokenText) -> str:
        return self._decoder.decode(text.raw)

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class _ByteRuns:
    """SentencePiece vocabularies: a run of byte tokens is text if all of it is UTF-8, else one U+FFFD a byte.

    A run longer than `_MAX_RUN` is decoded as it comes: equal again, unless it turns out invalid later.
    """

    def __init__(self, strip_space: bool) -> None:
        self._strip_space = strip_space  # still to be dropped from the beginning
        self._run = bytearray()
        self._long: codecs.IncrementalDecoder | None = None

    def push(self, token_id: int, text: TokenText) -> str:
        if not text.is_byte:
            return self._stripped(self._end_run() + text.raw.decode())
        if self._long is None:
            self._run += text.raw
            if len(self._run) <= _MAX_RUN:
                return ""
            self._long = codecs.getincrementaldecoder("utf-8")("replace")
            return self._stripped(self._long.decode(bytes(self._run)))
        return self._stripped(self._long.decode(text.raw))

    def flush(self) -> str:
        return self._stripped(self._end_run())

    def _end_run(self) -> str:
        run = bytes(self._run)
        self._run.clear()
        if self._long is not None:
            decoder, self._long = self._long, None
            return decoder.decode(b"", final=True)
        try:
            return run.decode()
        except UnicodeDecodeError:
            return _REPLACEMENT * len(run)

    def _stripped(self, text: str) -> str:
        if self._strip_space and text:
            self._strip_space = False
            return text.removeprefix(" ")
        return text


class _Window:
    """Other vocabularies: the decoder is asked for the last tokens with and without the new ones.

    The tokens before give it its context, as a word's first token may be decoded differently at the beginning.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._context: list[int] = []  # tokens whose text is out
        self._held: list[int] = []

    def push(self, token_id: int, text: TokenText) -> str:
        self._held.append(token_id)
        new = self._new_text()
        if new.endswith(_REPLACEMENT) and len(self._held) < _MAX_HELD:
            return ""
        return self._take(new)

    def flush(self) -> str:
        return self._take(self._new_text())

    def _new_text(self) -> str:
        before = self._tokenizer.decode(self._context, skip_special=False)
        both = self._tokenizer.decode(self._context + self._held, skip_special=False)
        return both[len(before) :]

    def _take(self, new: str) -> str:
        if new:  # tokens without text of their own stay, as they may matter to the next
            self._context, self._held = self._held, []
        elif len(self._held) >= _MAX_HELD:
            self._context, self._held = self._held[-_MAX_HELD:], []
        return new
