"""The page pool: how many pages of KV a number of bytes holds. No torch."""

import math
from dataclasses import dataclass

from ..errors import ConfigError
from .config import DType, EngineOptions
from .model_config import ModelConfig

ITEM_BYTES: dict[DType, int] = {"bfloat16": 2, "float16": 2, "float32": 4}
MIN_TOKENS = 256  # a pool that cannot hold a short chat serves nobody


@dataclass(frozen=True, slots=True)
class KVPlan:
    """Shape and size of the page pool: one allocation, each page of each layer contiguous in it."""

    pages: int  # page 0, the sink, counted in
    page_size: int  # tokens
    page_bytes: int  # of one page of one layer
    shape: tuple[int, int, int, int, int, int]  # layers, pages, 2 (K, V), kv_heads, page_size, head_dim
    dtype: DType
    nbytes: int

    @property
    def usable(self) -> int:
        """Pages that sequences can own."""
        return self.pages - 1

    @property
    def tokens(self) -> int:
        """Positions of all usable pages."""
        return self.usable * self.page_size

    @property
    def token_bytes(self) -> int:
        """KV of one token in all layers."""
        return self.page_bytes * self.shape[0] // self.page_size

    def fits(self, length: int) -> int:
        """How many sequences of `length` tokens it holds at once that share nothing."""
        return self.usable // math.ceil(length / self.page_size)


def column_bytes(config: ModelConfig, options: EngineOptions) -> int:
    """Bytes of one page in all layers."""
    return config.layers * 2 * config.kv_heads * options.page_size * config.head_dim * ITEM_BYTES[options.dtype]


def lay_out(config: ModelConfig, options: EngineOptions, pages: int) -> KVPlan:
    """A pool of `pages` pages, the sink counted in."""
    column = column_bytes(config, options)
    shape = (config.layers, pages, 2, config.kv_heads, options.page_size, config.head_dim)
    return KVPlan(pages, options.page_size, column // config.layers, shape, options.dtype, pages * column)


def pages_of(length: int, page_size: int) -> int:
    """The least pages of a pool that holds one sequence of `length` tokens: the sink is one more."""
    return 1 + math.ceil(length / page_size)


def plan_kv(config: ModelConfig, options: EngineOptions) -> KVPlan:
    """Divide `options.kv_memory` into pages. Raises ConfigError (kv_memory) with the minimum when it is too small."""
    column = column_bytes(config, options)
    pages = options.kv_memory // column
    least = pages_of(min(config.context_length, MIN_TOKENS), options.page_size)
    if pages < least:
        raise ConfigError(
            f"kv_memory is {options.kv_memory} bytes; this model takes at least {least * column} "
            f"({least} pages of {options.page_size} tokens, {column} bytes each)",
            field="kv_memory",
        )
    return lay_out(config, options, pages)
