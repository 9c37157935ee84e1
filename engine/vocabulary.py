"""A model's tokens as bytes, for the grammar library. No torch: the gateway's checks use it too."""

from collections.abc import Collection
from pathlib import Path

from llguidance import LLTokenizer

from ..errors import ConfigError, InvalidRequest
from .model_config import ModelConfig
from .token_texts import Joining
from .tokenizer import Tokenizer

ENOUGH = 1024  # bytes of a text that must come now
LONGEST = 64  # bytes of a token that the plain way of tokenizing looks for
_MARK = "\x02"  # a text that begins with it is split as in the middle of one: no tokenizer joins it to what follows


class _Bytes:
    """What `LLTokenizer` asks of a tokenizer."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, size: int, end: int) -> None:
        self.eos_token_id = end
        self.tokens = [tokenizer.texts[token].raw for token in range(size)]
        self.special_token_ids = sorted(token for token in tokenizer.special_ids if token < size)
        self._special = frozenset(self.special_token_ids)
        self._ids = {raw: token for token, raw in enumerate(self.tokens) if raw and token not in self._special}
        self._tokenizer = tokenizer

    def __call__(self, text: str | bytes) -> list[int]:
        """Tokens of a text that must come now, whose bytes are exactly the text's: the model's own ones where possible.

        Does not raise: the library would not expect it. Empty where there are none.
        """
        raw = text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass")
        if len(raw) > ENOUGH:  # the next token is all that is asked for, again for each
            cut = raw[:ENOUGH].decode("utf-8", "ignore").encode()
            return (self._own(cut) or self._plain(cut))[:-2]  # what is cut off might have joined the last ones
        return self._own(raw) or self._plain(raw)

    def _own(self, raw: bytes) -> list[int]:
        """As the model's tokenizer does it; empty where the bytes would not be these."""
        try:
            ids = self._tokenizer.encode_plain(_MARK + raw.decode())
        except (InvalidRequest, UnicodeDecodeError):
            return []
        before, first = b"", 0
        while first < len(ids) and not before.endswith(_MARK.encode()):
            before += self._bytes(ids[first])
            first += 1
        fits = before.strip(b" ") == _MARK.encode() and b"".join(map(self._bytes, ids[first:])) == raw
        return ids[first:] if fits and self._special.isdisjoint(ids) else []

    def _plain(self, raw: bytes) -> list[int]:
        """The longest token each time: what a normalizer changes, and what looks like a special token, needs that."""
        ids: list[int] = []
        start = 0
        while start < len(raw):
            ends = range(min(len(raw), start + LONGEST), start, -1)
            end = next((end for end in ends if raw[start:end] in self._ids), start)
            if end == start:
                return []
            ids.append(self._ids[raw[start:end]])
            start = end
        return ids

    def _bytes(self, token: int) -> bytes:
        return self.tokens[token] if token < len(self.tokens) else b""


def make_vocabulary(tokenizer: Tokenizer, size: int, end_ids: Collection[int]) -> LLTokenizer:
    """`size`: of the model's logits; ids beyond the tokenizer's have no bytes, and are never drawn. `end_ids`: the
    model's ends of text. ConfigError where outputs of this model cannot be constrained.

    Takes a second for 128k tokens, during which no other thread of the process runs.
    """
    if tokenizer.texts.joining is Joining.OTHER:
        raise ConfigError("this model's tokenizer does not tell which bytes a token stands for")
    ends = sorted(token for token in end_ids if token < size)
    if not ends:
        raise ConfigError("this model has no end-of-text token")
    return LLTokenizer(_Bytes(tokenizer, size, ends[0]), n_vocab=size, eos_token=ends)  # type: ignore[arg-type]


def read_vocabulary(directory: Path) -> LLTokenizer:
    """Of a model's directory. ConfigError as `make_vocabulary`, and where files cannot be used."""
    config = ModelConfig.from_dir(directory)
    return make_vocabulary(Tokenizer.from_dir(directory), config.vocab_size, config.eos_token_ids)
