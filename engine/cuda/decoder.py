"""The decoder on a GPU: the same layers as `engine/decoder.py` in fused kernels, each into memory that is given."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ...kernels.gpu.add_norm import add_norm
from ...kernels.gpu.decode_attention import DecodeScratch, decode_attention
from ...kernels.gpu.decode_plan import DecodePlan, decode_target_items, plan_decode
from ...kernels.gpu.embed import embed
from ...kernels.gpu.gated import gated, soft_cap_
from ...kernels.gpu.prefill_attention import prefill_attention
from ...kernels.gpu.prefill_shape import prefill_shape
from ...kernels.gpu.rope_write import rope_write
from ...kernels.gpu.state import set_table
from ...kernels.rope import rope_angles
from ..config import EngineOptions
from ..linear import Linear
from ..model_config import ModelConfig
from ..rope_config import Rope
from ..rope_scaling import frequencies
from ..weights import LayerWeights, Weights
from .buffers import Buffers
from .matrices import Matrices, dependent_launch
from .state import DeviceState


@dataclass(frozen=True, slots=True)
class StepTensors:
    """What a step's kernels read. The first `singles` tokens are of a sequence each; chunks follow, cut into tiles."""

    tokens: Tensor  # int32 [tokens]: -1 where the step before draws it
    slots: Tensor  # int32 [tokens]
    positions: Tensor  # int32 [tokens]
    updates: Tensor  # int32 [updates, 3]: what the device must know first, as `set_table` takes it
    turn: Tensor  # int32 [1]: of the step, for whoever tells the host of its tokens
    singles: int
    tiles: Tensor  # int32 [tiles, 4], of the tokens behind the singles
    last_tiles: Tensor  # the same for the last layer: of those that are picked
    picked: Tensor | None = None  # int64 [rows]: tokens whose successor is drawn, or scored; None: all


class CudaDecoder:
    """Runs the layers. The residual stream is float32, matrices and KV are in the engine's dtype."""

    def __init__(
        self, config: ModelConfig, weights: Weights, options: EngineOptions, pool: Tensor, state: DeviceState
    ) -> None:
        """`pool`: [layers, pages, 2, kv_heads, page_size, head_dim], contiguous, in the engine's dtype."""
        self._config = config
        self._weights = weights
        self._layers = list(pool.unbind(0))
        self._state = state
        self.buffers = Buffers(config, options, pool.dtype, pool.device)
        self._pdl = dependent_launch(pool.device)
        self._multiply = Matrices(weights, options, pool.dtype, pool.device)
        self._page_size = pool.shape[-2]
        self.prefill_shape = prefill_shape(
            config.heads,
            config.kv_heads,
            config.head_dim,
            self._page_size,
            pool.dtype,
            hopper=self._pdl and torch.cuda.get_device_capability(pool.device) == (9, 0),
            packed=options.batch_invariant,
        )
        self._q_width = config.heads * config.head_dim
        self._windows = [kind.window if kind.window < config.context_length else 0 for kind in config.layer_kinds]
        self._angles = {kind.rope: _angles(kind.rope, config.context_length, pool.device) for kind in config.kinds}
        items = decode_target_items(config.kv_heads, _multiprocessors(pool.device))
        self._plans = {w: DecodePlan(options.max_batch, target_items=items, device=pool.device) for w in self._windows}
        most = max(plan.max_items for plan in self._plans.values())
        self._scratch = DecodeScratch(most, config.heads, config.head_dim, device=pool.device)
        scale = torch.tensor(config.hidden_size**0.5, dtype=pool.dtype) if config.family.scaled_embedding else 1.0
        self._embedding_scale = float(scale)

    def hidden(
        self,
        step: StepTensors,
        written: Callable[[int], None] | None = None,
        observe: Callable[[Tensor], None] | None = None,
    ) -> Tensor:
        """Launches the layers: writes the step's KV and returns the normed final states of its picked tokens.

        [rows, width] in the engine's dtype, valid until the next step. `written` is called with a layer's index once
        the write of that layer's KV is launched; `observe` is shown the residual stream, float32 [tokens, width]: the
        embeddings, then after each layer (with nothing picked).
        """
        config, buffers, eps = self._config, self.buffers, self._config.norm_eps
        count = step.tokens.shape[0]
        hidden, normed, delta = buffers.hidden[:count], buffers.normed[:count], buffers.projected[:count]
        set_table(self._state.tables, self._state.last_tokens, step.updates)
        embed(step.tokens, step.slots, self._state.last_tokens, self._weights.embedding, hidden, self._embedding_scale)
        if step.singles:
            for window, plan in self._plans.items():
                slots, positions = step.slots[: step.singles], step.positions[: step.singles]
                plan_decode(plan, slots, positions, page_size=self._page_size, window=window)
        added: Tensor | None = None
        post: Tensor | None = None
        for i, layer in enumerate(self._weights.layers):
            add_norm(hidden, added, layer.attention_norm, eps, normed, post, pdl=self._pdl)
            if observe is not None:
                observe(hidden)
            attended = self._attention(i, layer, step, normed, written)
            if step.picked is not None and i == config.layers - 1:  # nobody reads the others any more
                attended, hidden = self._pick(step.picked, attended, hidden)
                normed, delta = buffers.normed[: len(hidden)], buffers.projected[: len(hidden)]
                if not len(hidden):
                    return normed
            self._multiply(attended, layer.o, delta)
            add_norm(hidden, delta, layer.mlp_norm, eps, normed, layer.attention_post_norm, pdl=self._pdl)
            self._mlp(layer, normed, delta)
            added, post = delta, layer.mlp_post_norm
        add_norm(hidden, added, self._weights.norm, eps, normed, post, pdl=self._pdl)
        if observe is not None:
            observe(hidden)
        return normed

    def head(self, normed: Tensor) -> Tensor:
        """Logits of normed final states [rows, width]: [rows, vocab], valid until the next call."""
        return self._head(normed, self._weights.head)

    def _head(self, normed: Tensor, head: Linear) -> Tensor:
        logits = self.buffers.logits[: normed.shape[0]]
        self._multiply(normed, head, logits)
        if self._config.final_cap:
            soft_cap_(logits, self._config.final_cap)
        return logits

    def _attention(
        self,
        i: int,
        layer: LayerWeights,
        step: StepTensors,
        normed: Tensor,
        written: Callable[[int], None] | None,
    ) -> Tensor:
        """`normed`: [tokens, width]. Returns [tokens, heads * head_dim]."""
        config, count = self._config, normed.shape[0]
        qkv, out = self.buffers.qkv[:count], self.buffers.attended[:count]
        self._multiply(normed, layer.qkv, qkv)
        rope_write(
            qkv,
            step.positions,
            step.slots,
            self._angles[config.layer_kinds[i].rope],
            self._layers[i],
            self._state.tables,
            heads=config.heads,
            kv_heads=config.kv_heads,
            page_size=self._page_size,
            eps=config.norm_eps,
            qk_norm=layer.qk_norm,
            pdl=self._pdl,
        )
        if written is not None:
            written(i)
        queries, window = qkv[:, : self._q_width], self._windows[i]
        if singles := step.singles:
            decode_attention(
                queries[:singles],
                self._layers[i],
                self._state.tables,
                step.slots[:singles],
                step.positions[:singles],
                self._plans[window],
                self._scratch,
                out[:singles],
                kv_heads=config.kv_heads,
                page_size=self._page_size,
                scale=config.attention_scale,
                cap=config.attention_cap,
                window=window,
                pdl=self._pdl,
            )
        prefill_attention(
            queries,
            self._layers[i],
            self._state.tables,
            step.last_tiles if i == config.layers - 1 else step.tiles,
            out,
            heads=config.heads,
            kv_heads=config.kv_heads,
            page_size=self._page_size,
            scale=config.attention_scale,
            cap=config.attention_cap,
            window=window,
            shape=self.prefill_shape,
        )
        return out

    def _mlp(self, layer: LayerWeights, normed: Tensor, out: Tensor) -> None:
        """`normed`, `out`: [rows, width]."""
        rows = normed.shape[0]
        gate_up, activated = self.buffers.gate_up[:rows], self.buffers.activated(rows)
        self._multiply(normed, layer.gate_up, gate_up)
        gated(gate_up, activated, self._config.activation, pdl=self._pdl)
        self._multiply(activated, layer.down, out)

    def _pick(self, rows: Tensor, attended: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Those rows of both: [rows, heads * head_dim], and of the stream, float32 [rows, width], to its front."""
        count = rows.shape[0]
        picked = self.buffers.picked(count)
        torch.index_select(attended, 0, rows, out=picked)
        width = hidden.shape[1]
        stream = self.buffers.gate_up.view(torch.float32).view(-1)[: count * width].view(count, width)
        torch.index_select(hidden, 0, rows, out=stream)
        return picked, self.buffers.hidden[:count].copy_(stream)


def _angles(rope: Rope, positions: int, device: torch.device) -> Tensor:
    """float32 [positions, rotary_dim]: cosines, then sines of the rotary_dim / 2 frequencies."""
    cos, sin = rope_angles(torch.arange(positions, device=device), frequencies(rope, device), rope.attention_factor)
    half = cos.shape[-1] // 2
    return torch.cat((cos[:, 0, :half], sin[:, 0, half:]), dim=1).contiguous()


def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
