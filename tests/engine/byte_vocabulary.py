"""A vocabulary without a tokenizer: token 0 ends a text, 1 to 256 are the bytes, others are pairs and nothing."""

import functools

from llguidance import LLTokenizer

PAIRS = [b"aa", b"ab", b"ba", b"bb", b"ab", b", ", b'"}', b"\xc3\xa9", b"12", b'{"', b" a"]
PADDING = 7  # ids at the end that have no bytes


def token_bytes(size: int) -> list[bytes]:
    """Of each token."""
    rest = size - 257 - PADDING
    return [b"<end>", *(bytes([byte]) for byte in range(256)), *(PAIRS * rest)[:rest], *[b""] * PADDING]


def encode(text: str) -> list[int]:
    """A byte a token."""
    return [1 + byte for byte in text.encode()]


class _Bytes:
    is_tokenizer_wrapper = True
    eos_token_id = 0
    bos_token_id = None
    special_token_ids = (0,)

    def __init__(self, size: int) -> None:
        self.tokens = token_bytes(size)

    def __call__(self, text: str | bytes) -> list[int]:
        return encode(text if isinstance(text, str) else text.decode())


@functools.cache
def byte_vocabulary(size: int) -> LLTokenizer:
    """Of so many tokens."""
    return LLTokenizer(_Bytes(size), eos_token=[0])  # type: ignore[arg-type]
