"""How many pages of KV the memory given holds."""

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


def plan_kv(config: ModelConfig, options: EngineOptions) -> KVPlan:
    """Divide `options.kv_memory` into pages. Raises ConfigError (kv_memory) with the minimum when it is too small."""
    inner = (2, config.kv_heads, options.page_size, config.head_dim)
    page_bytes = math.prod(inner) * ITEM_BYTES[options.dtype]
    column = page_bytes * config.layers
    pages = options.kv_memory // column
    least = 1 + math.ceil(min(config.context_length, MIN_TOKENS) / options.page_size)
    if pages < least:
        raise ConfigError(
            f"kv_memory is {options.kv_memory} bytes; this model takes at least {least * column} "
            f"({least} pages of {options.page_size} tokens, {column} bytes each)",
            field="kv_memory",
        )
    return KVPlan(pages, options.page_size, page_bytes, (config.layers, pages, *inner), options.dtype, pages * column)
