"""A model's tensors out of safetensors files, fused and laid out for the decoder."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from .checkpoint import Checkpoint
from .linear import Linear
from .model_config import ModelConfig
from .tensor_names import expected_shapes, matrices, norms


@dataclass(slots=True)
class LayerWeights:
    """One decoder layer. Matrices of one input are fused, [out, in], their rows in the order of their names here."""

    attention_norm: Tensor  # [hidden], float32, as all norms; offsets are added in
    qkv: Linear  # q heads, k heads, v heads
    o: Linear
    mlp_norm: Tensor  # [hidden]
    gate_up: Linear
    down: Linear
    qk_norm: Tensor | None = None  # [heads + kv_heads, head_dim]: a row a head
    attention_post_norm: Tensor | None = None  # [hidden]
    mlp_post_norm: Tensor | None = None  # [hidden]

    @classmethod
    def of(cls, linear: Mapping[str, Linear], norm: Mapping[str, Tensor], qk_norm: Tensor | None) -> "LayerWeights":
        """From parts by the names that `tensor_names.py` gives them; norms that a family lacks are left out."""
        return cls(
            attention_norm=norm["attention_norm"],
            qkv=linear["qkv"],
            o=linear["o"],
            mlp_norm=norm["mlp_norm"],
            gate_up=linear["gate_up"],
            down=linear["down"],
            qk_norm=qk_norm,
            attention_post_norm=norm.get("attention_post_norm"),
            mlp_post_norm=norm.get("mlp_post_norm"),
        )


@dataclass(slots=True)
class Weights:
    """The whole model."""

    embedding: Tensor  # [vocab, hidden], in the engine's dtype
    layers: list[LayerWeights]
    norm: Tensor  # [hidden], float32
    head: Linear  # hidden -> vocab


def load_weights(
    path: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: str = "cpu",
    progress: Callable[[str, int, int], None] | None = None,
) -> Weights:
    """Read `path`'s safetensors (one file, or shards with an index), converted to `dtype`.

    `progress`: told ("weights", bytes done, bytes in all), as they are on the device.
    Raises ConfigError naming the tensors that are missing or misshapen before any of them is read.
    """
    shapes = expected_shapes(config)
    total = sum(prod(shape) for shape in shapes.values()) * dtype.itemsize
    with ExitStack() as stack:
        files = Checkpoint(path, stack)
        files.check(shapes)
        told = None if progress is None else partial(progress, "weights")
        return _Loader(files, config, dtype, device, total, told).load()


class _Loader:
    """Copies tensors into fused matrices."""

    def __init__(
        self,
        files: Checkpoint,
        config: ModelConfig,
        dtype: torch.dtype,
        device: str,
        total: int,
        progress: Callable[[int, int], None] | None,
    ) -> None:
        """`total`: bytes to read, in `dtype`."""
        self._done = 0
        self._total = total
        self._progress = progress
        self._files = files
        self._config = config
        self._dtype = dtype
        self._device = device

    def load(self) -> Weights:
        embedding = self._fused(["model.embed_tokens"], "weight")
        head = embedding if self._config.tied else self._fused(["lm_head"], "weight")
        layers = [self._layer(f"model.layers.{i}.") for i in range(self._config.layers)]
        return Weights(embedding, layers, self._norm("model.norm"), Linear(head))

    def _layer(self, at: str) -> LayerWeights:
        linear = {m.name: self._linear([at + name for name in m.stored], m.bias) for m in matrices(self._config)}
        norm = {name: self._norm(at + stored) for name, stored in norms(self._config.family).items()}
        return LayerWeights.of(linear, norm, self._head_norms(at) if self._config.family.qk_norm else None)

    def _head_norms(self, at: str) -> Tensor:
        counts = {"q": self._config.heads, "k": self._config.kv_heads}
        return torch.cat([self._norm(f"{at}self_attn.{name}_norm").expand(n, -1) for name, n in counts.items()])

    def _norm(self, name: str) -> Tensor:
        weight = self._files.read(name + ".weight").to(self._device, torch.float32, copy=True)
        self._tell(weight.numel())
        return weight.add_(self._config.family.norm_offset)

    def _linear(self, names: list[str], bias: bool) -> Linear:
        return Linear(self._fused(names, "weight"), self._fused(names, "bias") if bias else None)

    def _fused(self, names: list[str], kind: str) -> Tensor:
        parts = [self._files.read(f"{name}.{kind}").to(self._device, self._dtype) for name in names]
        self._tell(sum(part.numel() for part in parts))
        # A tensor read without conversion may be a view of the mapped file; one that stays must not depend on it.
        return torch.cat(parts) if len(parts) > 1 else parts[0].clone()

    def _tell(self, elements: int) -> None:
        self._done += elements * self._dtype.itemsize
        if self._progress is not None:
            self._progress(self._done, self._total)
