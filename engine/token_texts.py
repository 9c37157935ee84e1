"""What each token of a vocabulary adds to the text, in bytes: a token may be a part of a character."""

import re
from enum import Enum
from typing import Any, NamedTuple

import tokenizers

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_REPLACE = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
_STRIP = {"type": "Strip", "content": " ", "start": 1, "stop": 0}


class Joining(Enum):
    """How a tokenizer's decoder makes text of tokens."""

    BYTE_LEVEL = 1  # GPT-2's way: each character of a token stands for a byte
    BYTE_FALLBACK = 2  # SentencePiece's: U+2581 is a space, <0xE4> is a byte
    OTHER = 3  # it depends on the neighbours: only the decoder itself knows


class TokenText(NamedTuple):
    """One token's share of the text."""

    raw: bytes
    special: bool
    is_byte: bool  # a <0xE4> token of BYTE_FALLBACK


class TokenTexts:
    """Looks tokens up, remembering what it found (at most once the vocabulary)."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, decoder: Any) -> None:
        """`decoder`: that of tokenizer.json."""
        self._tokenizer = tokenizer
        self.special = frozenset(i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special)
        self._found: dict[int, TokenText] = {}
        self._bytes = {character: byte for byte, character in enumerate(_byte_characters())}
        self.joining, self.strips_space = _joining(decoder)

    def __getitem__(self, token_id: int) -> TokenText:
        """A token's share; nothing for an id without a token (vocabularies are padded)."""
        found = self._found.get(token_id)
        if found is None:
            found = self._found[token_id] = self._look_up(token_id)
        return found

    def _look_up(self, token_id: int) -> TokenText:
        token = self._tokenizer.id_to_token(token_id)
        special = token_id in self.special
        if token is None:
            return TokenText(b"", special, False)
        if self.joining is Joining.BYTE_LEVEL:
            if all(character in self._bytes for character in token):
                return TokenText(bytes(self._bytes[character] for character in token), special, False)
            return TokenText(token.encode(), special, False)
        if self.joining is Joining.BYTE_FALLBACK:
            match = _BYTE_TOKEN.fullmatch(token)
            if match is not None:
                return TokenText(bytes.fromhex(match[1]), special, True)
            return TokenText(token.replace("▁", " ").encode(), special, False)
        return TokenText(self._tokenizer.decode([token_id], skip_special_tokens=False).encode(), special, False)


def _joining(decoder: Any) -> tuple[Joining, bool]:
    """The kind, and whether the text's first space is dropped. Anything unknown is OTHER, which is slower but right."""
    steps = [decoder]
    if isinstance(decoder, dict) and decoder.get("type") == "Sequence":
        steps = list(decoder.get("decoders") or [])
    kinds = [step.get("type") if isinstance(step, dict) else None for step in steps]
    if kinds == ["ByteLevel"]:
        return Joining.BYTE_LEVEL, False
    if kinds[:3] == ["Replace", "ByteFallback", "Fuse"] and steps[0] == _REPLACE and steps[3:] in ([], [_STRIP]):
        return Joining.BYTE_FALLBACK, len(steps) == 4
    return Joining.OTHER, False


def _byte_characters() -> list[str]:
    """GPT-2's printable character for each of the 256 bytes: itself if it prints, else the next one from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]
