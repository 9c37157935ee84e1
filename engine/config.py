"""Options of one engine. Settings from flags, environment and file end here."""

from dataclasses import dataclass
from typing import Literal

Reserve = Literal["prompt", "expected", "max"]
DType = Literal["bfloat16", "float16", "float32"]


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Validated by `services/settings.py`; sizes in tokens unless said otherwise."""

    dtype: DType = "bfloat16"  # of weights, activations and KV
    device: str = "cpu"
    page_size: int = 16
    kv_memory: int = 1 << 30  # bytes of the page pool
    max_batch: int = 64  # sequences that run at once
    max_input: int = 0  # 0: the model's context
    max_output: int = 0  # 0: the model's context
    token_budget: int = 512  # tokens computed a step, decode rows counted in
    decode_prefill_budget: int = 128  # of these, prompt tokens while this engine also decodes others' KV (role decode)
    reserve: Reserve = "expected"  # pages set aside beyond prompt + 1 for a sequence
    watermark: float = 0.01  # share of the pool kept free at admission
    prefix_cache: bool = True
    unticketed_share: float = 0.5  # PREFILL: most of the pool that sequences without a ticket may hold
    threads: int = 0  # torch threads; 0: leave as is
