"""A model's tokens as bytes, for the grammar library. No torch: the gateway's checks use it too."""

from collections.abc import Collection
from pathlib import Path

from llguidance import LLTokenizer

from ..errors import ConfigError
from .model_config import ModelConfig
from .token_texts import Joining
from .tokenizer import Tokenizer


class _Bytes:
    """What `LLTokenizer` asks of a tokenizer."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, size: int, end: int) -> None:
        self.eos_token_id = end
        self.tokens = [tokenizer.texts[token].raw for token in range(size)]
        self.special_token_ids = sorted(token for token in tokenizer.special_ids if token < size)
        self._tokenizer = tokenizer

    def __call__(self, text: str | bytes) -> list[int]:
        return self._tokenizer.encode_plain(text if isinstance(text, str) else text.decode("utf-8", "replace"))


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
