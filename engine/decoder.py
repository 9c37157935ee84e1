"""The decoder: a Llama-style Transformer over the paged pool, with the variations that `architecture.py` declares."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..kernels.activation import gelu_tanh_mul, silu_mul, soft_cap
from ..kernels.attention import Scores, paged_attention
from ..kernels.attention_plan import AttentionPlan
from ..kernels.kv_write import write_kv_
from ..kernels.norm import head_norm_, rms_norm
from ..kernels.rope import rotate_
from ..kernels.scratch import Scratch
from .model_config import ModelConfig
from .weights import LayerWeights, Weights


@dataclass(frozen=True, slots=True)
class KindInputs:
    """What the layers of one kind share in a step."""

    cos: Tensor  # float32 [tokens, 1, rotary_dim]
    sin: Tensor  # float32 [tokens, 1, rotary_dim]
    attention: AttentionPlan


@dataclass(frozen=True, slots=True)
class StepInputs:
    """A step's tensors."""

    token_ids: Tensor  # int64 [tokens]
    kv_rows: Tensor  # int64 [tokens * 2 * kv_heads]
    by_kind: list[KindInputs]  # in the order of ModelConfig.kinds
    sampled: Tensor  # int64 [samples]: tokens whose successor is drawn, or scored


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
        self._kind_of = [config.kinds.index(kind) for kind in config.layer_kinds]
        self._scores = Scores(config.attention_scale, config.attention_cap)
        self._activate = gelu_tanh_mul if config.activation == "gelu_tanh" else silu_mul
        # In the engine's dtype, as those who train these models multiply by it.
        scale = torch.tensor(config.hidden_size**0.5, dtype=self._dtype) if config.family.scaled_embedding else 1.0
        self._embedding_scale = float(scale)

    def forward(self, step: StepInputs, written: Callable[[int], None] | None = None) -> Tensor:
        """Write the step's KV and return the logits of its sampled tokens: [samples, vocab].

        `written` is called with a layer's index once the KV of that layer is written.
        """
        return self.head(self.hidden(step, written))

    def head(self, hidden: Tensor) -> Tensor:
        """Logits [rows, vocab] of final hidden states [rows, width]."""
        if not hidden.shape[0]:
            return hidden.new_empty(0, self._config.vocab_size)
        logits = self._weights.head(rms_norm(hidden, self._weights.norm, self._config.norm_eps, self._dtype))
        return soft_cap(logits, self._config.final_cap) if self._config.final_cap else logits

    def hidden(
        self,
        step: StepInputs,
        written: Callable[[int], None] | None = None,
        observe: Callable[[Tensor], None] | None = None,
    ) -> Tensor:
        """As `forward`, without the head: float32 [samples, width].

        `observe` is shown the residual stream, float32 [tokens, width]: the embeddings, then after each layer.
        """
        eps = self._config.norm_eps
        hidden = self._weights.embedding.index_select(0, step.token_ids).to(torch.float32)
        if self._embedding_scale != 1.0:
            hidden *= self._embedding_scale
        last = self._config.layers - 1
        for i, layer in enumerate(self._weights.layers):
            if observe is not None:
                observe(hidden)
            inputs = step.by_kind[self._kind_of[i]]
            qkv = layer.qkv(rms_norm(hidden, layer.attention_norm, eps, self._dtype))
            self._write(i, layer, qkv, inputs, step.kv_rows)
            if written is not None:
                written(i)
            if i == last and not step.sampled.numel():
                break
            attended = paged_attention(
                qkv[:, : self._q_width], self._slabs[i], inputs.attention, self._scratch, self._scores
            )
            if i == last:  # nobody reads the others any more
                attended, hidden = attended.index_select(0, step.sampled), hidden.index_select(0, step.sampled)
            hidden += self._normed(layer.o(attended), layer.attention_post_norm)
            gate_up = layer.gate_up(rms_norm(hidden, layer.mlp_norm, eps, self._dtype))
            hidden += self._normed(layer.down(self._activate(gate_up)), layer.mlp_post_norm)
        if observe is not None:
            observe(hidden)
        return hidden if step.sampled.numel() else hidden[:0]

    def _normed(self, x: Tensor, norm: Tensor | None) -> Tensor:
        """What is added to the stream. `x`: [tokens, width]; `norm`: [width] or None."""
        return x if norm is None else rms_norm(x.to(torch.float32), norm, self._config.norm_eps, torch.float32)

    def _write(self, i: int, layer: LayerWeights, qkv: Tensor, inputs: KindInputs, rows: Tensor) -> None:
        """`qkv`: [tokens, (heads + 2 * kv_heads) * head_dim]; its Q and K are normalised and rotated in place."""
        head_dim, rotary_dim = self._config.head_dim, inputs.cos.shape[-1]
        heads = qkv.view(qkv.shape[0], -1, head_dim)[:, : self._qk_heads]
        if layer.qk_norm is not None:
            head_norm_(heads, layer.qk_norm, self._config.norm_eps)
        rotate_(heads if rotary_dim == head_dim else heads[..., :rotary_dim], inputs.cos, inputs.sin)
        write_kv_(self._rows[i], rows, qkv[:, self._q_width :])
