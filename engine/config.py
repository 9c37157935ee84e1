"""Options of one engine. Settings from flags, environment and file end here."""

from dataclasses import dataclass
from typing import Literal

Reserve = Literal["prompt", "expected", "max"]
DType = Literal["bfloat16", "float16", "float32"]
LoadFormat = Literal["auto", "dummy"]

BY_DEVICE = {
    "page_size": {"cpu": 16, "cuda": 64},
    "token_budget": {"cpu": 512, "cuda": 8192 + 256},  # a chunk of 8k beside a full batch
    "prompt_batch": {"cpu": 1 << 20, "cuda": 2048},  # a large model keeps a GPU busy with 1000
    "max_batch": {"cpu": 64, "cuda": 256},
    "kv_memory": {"cpu": 1 << 30, "cuda": 0},
}
"""What 0 means in these options, by the device's type."""


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Validated by `services/settings.py`; sizes in tokens unless said otherwise.

    0 in an option of BY_DEVICE becomes the device's default when the options are made: whoever reads them, and the
    handshake and the log, see what holds.
    """

    dtype: DType = "bfloat16"  # of weights, activations and KV
    device: str = "cpu"  # or cuda, cuda:N
    page_size: int = 0  # 0: by device
    kv_memory: int = 0  # bytes of the page pool; 0: by device, on a GPU what `gpu_memory` leaves
    gpu_memory: float = 0.9  # most of the GPU's memory that the process takes: a share up to 1, else bytes
    max_batch: int = 0  # sequences that run at once, below `token_budget`; 0: by device
    max_input: int = 0  # 0: the model's context
    max_output: int = 0  # 0: the model's context
    token_budget: int = 0  # tokens computed a step, decode rows counted in; 0: by device
    prompt_batch: int = 0  # where none decodes, prompts join a step while it has fewer tokens; 0: by device
    decode_prefill_budget: int = 128  # of these, prompt tokens while this engine also decodes others' KV (role decode)
    reserve: Reserve = "expected"  # pages set aside beyond prompt + 1 for a sequence
    watermark: float = 0.01  # share of the pool kept free at admission
    prefix_cache: bool = True
    unticketed_share: float = 0.5  # PREFILL: most of the pool that sequences without a ticket may hold
    threads: int = 0  # torch threads; 0: leave as is
    load_format: LoadFormat = "auto"  # dummy: random weights, whatever files there are
    batch_invariant: bool = False  # the same tokens alone or among others, across chunks and prefix hits
    cuda_graphs: bool = True  # decode steps are replayed, not launched kernel by kernel

    def __post_init__(self) -> None:
        """Fills in what is left to the device, and bounds the batch: prompts always get a token of a step."""
        for name, values in BY_DEVICE.items():
            if getattr(self, name) == 0:
                object.__setattr__(self, name, values.get(self.device_type, values["cpu"]))
        object.__setattr__(self, "max_batch", max(1, min(self.max_batch, self.token_budget - 1)))

    @property
    def device_type(self) -> str:
        """cpu or cuda, without an index."""
        return self.device.partition(":")[0]
