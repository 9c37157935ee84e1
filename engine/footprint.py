"""Bytes of what an engine holds beside its KV pool, from shapes alone. No torch.

`workspace` is a contract: the GPU's runner allocates these buffers once (`cuda/buffers.py` and its neighbours), and
while serving nothing that is larger than a few MiB.
"""

from collections.abc import Mapping
from math import prod

from .config import EngineOptions
from .memory import ITEM_BYTES
from .model_config import ModelConfig
from .tensor_names import matrices, norms

FLOAT32 = 4
HEAD_ROWS = 32  # least rows of logits at once: of prompts whose log-probabilities are wanted (`scoring.py`)
GEMM_PARTIALS = 1056 << 16  # most bytes of partial sums of a matrix product (`kernels/gpu/invariant_gemm.py`)
MULTIPROCESSORS = 132  # of an H100 or H200; what is sized by them is small
GRAPH_BYTES = 24 << 20  # a captured batch size: the kernels' arguments and their launch records
CONTEXT_BYTES = 1 << 30  # CUDA context, cuBLAS workspaces, loaded kernels


def weight_bytes(config: ModelConfig, options: EngineOptions) -> int:
    """Of all weights as the engine holds them: matrices in its dtype, norms in float32; exact.

    On a CPU a tied output matrix counts twice: it is packed anew for oneDNN, the embedding table stays.
    """
    table = config.vocab_size * config.hidden_size
    tables = 1 if config.tied and options.device_type != "cpu" else 2
    layer = sum(sum(m.rows) * (m.columns + m.bias) for m in matrices(config))
    norm = len(norms(config.family)) * config.hidden_size
    if config.family.qk_norm:
        norm += (config.heads + config.kv_heads) * config.head_dim
    items = tables * table + config.layers * layer
    return items * ITEM_BYTES[options.dtype] + (config.layers * norm + config.hidden_size) * FLOAT32


def rotation_bytes(config: ModelConfig, options: EngineOptions) -> int:
    """Of the tables of cosines and sines, float32 [context, rotary_dim] a kind of rotation; on a CPU there are none."""
    if options.device_type == "cpu":
        return 0
    return sum(config.context_length * rope.dim * FLOAT32 for rope in {kind.rope for kind in config.kinds})


def workspace(config: ModelConfig, options: EngineOptions) -> Mapping[str, int]:
    """Bytes of each buffer of a step of `token_budget` tokens, at most `max_batch` of which are sampled."""
    tokens, rows, item = options.token_budget, options.max_batch, ITEM_BYTES[options.dtype]
    width, inner, vocabulary = config.hidden_size, config.intermediate_size, config.vocab_size
    q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
    pages = -(-config.context_length // options.page_size)
    shapes: dict[str, tuple[int, ...]] = {
        "hidden": (tokens, width, FLOAT32),
        "normed": (tokens, width, item),
        "qkv": (tokens, q + 2 * kv, item),
        "attended": (tokens, q, item),
        "projected": (tokens, width, item),
        "gate_up": (tokens, 2 * inner, item),
        "activated": (tokens, max(inner, q), item),
        "logits": (max(rows, HEAD_ROWS), vocabulary, item),
        "sampler": (rows, vocabulary, FLOAT32),
        "masked_logits": (0 if options.device_type == "cpu" else rows, vocabulary, item),
        "masks": (0 if options.device_type == "cpu" else rows, -(-vocabulary // 32) + 1, 4),
        "decode_partials": (decode_items(config, options), config.heads, config.head_dim + 2, FLOAT32),
        "gemm_partials": (0 if options.device_type == "cpu" else GEMM_PARTIALS,),
        "block_tables": (2 * rows + 1, pages + 1, 4),  # two slots a sequence, slot 0 is the padding rows'
    }
    return {name: prod(shape) for name, shape in shapes.items()}


def workspace_bytes(config: ModelConfig, options: EngineOptions) -> int:
    """Of all buffers of a step."""
    return sum(workspace(config, options).values())


def decode_items(config: ModelConfig, options: EngineOptions) -> int:
    """Most pieces into which decode attention splits a batch, for each of which a partial result is kept."""
    per_device = max(1, 4 * MULTIPROCESSORS // config.kv_heads)
    return options.max_batch + per_device


def graph_sizes(options: EngineOptions) -> tuple[int, ...]:
    """Batch sizes whose decode steps are captured: close together where a padding row costs most. None on a CPU."""
    if options.device_type == "cpu" or not options.cuda_graphs:
        return ()
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, 4097, 64)]
    most = options.max_batch
    return (*(size for size in sizes if size < most), most)


def graph_bytes(options: EngineOptions) -> int:
    """An estimate of what the captured graphs take."""
    return len(graph_sizes(options)) * GRAPH_BYTES
