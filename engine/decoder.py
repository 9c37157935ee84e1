"""The decoder: a Llama-style Transformer over the paged pool."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..kernels.activation import silu_mul
from ..kernels.attention import paged_attention
from ..kernels.attention_plan import AttentionPlan
from ..kernels.kv_write import write_kv_
from ..kernels.norm import rms_norm
from ..kernels.rope import rotate_
from ..kernels.scratch import Scratch
from .model_config import ModelConfig
from .weights import Weights


@dataclass(frozen=True, slots=True)
class StepInputs:
    """A step's tensors, the same for every layer."""

    token_ids: Tensor  # int64 [tokens]
    cos: Tensor  # float32 [tokens, 1, head_dim]
    sin: Tensor  # float32 [tokens, 1, head_dim]
    kv_rows: Tensor  # int64 [tokens * 2 * kv_heads]
    attention: AttentionPlan
    sampled: Tensor  # int64 [samples]: tokens whose successor is drawn


class Decoder:
    """Runs the layers. The residual stream is float32, matrices and KV are in the engine's dtype."""

    def __init__(self, config: ModelConfig, weights: Weights, pool: Tensor) -> None:
        """`pool`: [layers, pages, 2, kv_heads, page_size, head_dim], contiguous, in the engine's dtype."""
        self._config = config
        self._weights = weights
        self._dtype = pool.dtype
        head_dim, page_size = pool.shape[-1], pool.shape[-2]
        self._rows = list(pool.view(pool.shape[0], -1, head_dim).unbind(0))
        self._slabs = list(pool.view(pool.shape[0], -1, page_size * head_dim).unbind(0))
        self._q_width = config.heads * config.head_dim
        self._scratch = Scratch(pool.device)
        self._qk_heads = config.heads + config.kv_heads

    def forward(self, step: StepInputs, written: Callable[[int], None] | None = None) -> Tensor:
        """Write the step's KV and return the logits of its sampled tokens: [samples, vocab].

        `written` is called with a layer's index once the KV of that layer is written.
        """
        eps = self._config.norm_eps
        hidden = self._weights.embedding.index_select(0, step.token_ids).to(torch.float32)
        last = self._config.layers - 1
        for i, layer in enumerate(self._weights.layers):
            qkv = layer.qkv(rms_norm(hidden, layer.attention_norm, eps, self._dtype))
            self._write(i, qkv, step)
            if written is not None:
                written(i)
            if i == last and not step.sampled.numel():
                break
            attended = paged_attention(qkv[:, : self._q_width], self._slabs[i], step.attention, self._scratch)
            if i == last:  # nobody reads the others any more
                attended, hidden = attended.index_select(0, step.sampled), hidden.index_select(0, step.sampled)
            hidden += layer.o(attended)
            gate_up = layer.gate_up(rms_norm(hidden, layer.mlp_norm, eps, self._dtype))
            hidden += layer.down(silu_mul(gate_up))
        if not step.sampled.numel():
            return hidden.new_empty(0, self._config.vocab_size)
        return self._weights.head(rms_norm(hidden, self._weights.norm, eps, self._dtype))

    def _write(self, layer: int, qkv: Tensor, step: StepInputs) -> None:
        """`qkv`: [tokens, (heads + 2 * kv_heads) * head_dim]; its Q and K are rotated in place."""
        head_dim = self._config.head_dim
        heads = qkv.view(qkv.shape[0], -1, head_dim)
        rotate_(heads[:, : self._qk_heads], step.cos, step.sin)
        write_kv_(self._rows[layer], step.kv_rows, qkv[:, self._q_width :])
