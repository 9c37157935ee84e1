"""A model's tensors out of safetensors files, fused and laid out for the decoder."""

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..errors import ConfigError
from .linear import Linear
from .model_config import ModelConfig

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


@dataclass(slots=True)
class LayerWeights:
    """One decoder layer. Matrices of one input are fused, [out, in], their rows in the order of their names here."""

    attention_norm: Tensor  # [hidden], float32
    qkv: Linear  # q heads, k heads, v heads
    o: Linear
    mlp_norm: Tensor  # [hidden], float32
    gate_up: Linear
    down: Linear


@dataclass(slots=True)
class Weights:
    """The whole model."""

    embedding: Tensor  # [vocab, hidden], in the engine's dtype
    layers: list[LayerWeights]
    norm: Tensor  # [hidden], float32
    head: Linear  # hidden -> vocab


def load_weights(path: Path, config: ModelConfig, dtype: torch.dtype, device: str = "cpu") -> Weights:
    """Read `path`'s safetensors (one file, or shards with an index), converted to `dtype`.

    Raises ConfigError naming the tensors that are missing or misshapen before any of them is read.
    """
    with ExitStack() as stack:
        files = _Checkpoint(path, stack)
        files.check(_expected(config))
        return _Loader(files, config, dtype, device).load()


class _Checkpoint:
    """The open safetensors files of a directory: which tensor is where."""

    def __init__(self, path: Path, stack: ExitStack) -> None:
        self._path = path
        self._where: dict[str, Any] = {}
        for name in _file_names(path):
            try:
                handle = stack.enter_context(safe_open(path / name, framework="pt"))
            except (OSError, SafetensorError) as error:
                raise ConfigError(f"{path / name} cannot be read: {error}", field="model") from error
            self._where.update(dict.fromkeys(handle.keys(), handle))

    def check(self, expected: Mapping[str, tuple[int, ...]]) -> None:
        """Raise ConfigError unless each name is there in its shape."""
        wrong = []
        for name, shape in expected.items():
            if name not in self._where:
                wrong.append(f"{name} is missing")
            elif (found := tuple(self._where[name].get_slice(name).get_shape())) != shape:
                wrong.append(f"{name} is {list(found)}, not {list(shape)}")
        if wrong:
            rest = f" and {len(wrong) - 5} more" if len(wrong) > 5 else ""
            raise ConfigError(f"{self._path} does not fit its config.json: {', '.join(wrong[:5])}{rest}", field="model")

    def read(self, name: str) -> Tensor:
        tensor: Tensor = self._where[name].get_tensor(name)
        return tensor


def _file_names(path: Path) -> list[str]:
    if (path / INDEX).exists():
        try:
            names = set(json.loads((path / INDEX).read_text(encoding="utf-8"))["weight_map"].values())
        except (OSError, ValueError, KeyError, AttributeError) as error:
            raise ConfigError(f"{path / INDEX} cannot be read: {error!r}", field="model") from error
        if any(not isinstance(name, str) or Path(name).name != name for name in names):
            raise ConfigError(f"{path / INDEX} names files outside its directory", field="model")
        return sorted(names)
    if (path / SINGLE).exists():
        return [SINGLE]
    raise ConfigError(f"{path} has neither {SINGLE} nor {INDEX}", field="model")


class _Loader:
    """Copies tensors into fused matrices."""

    def __init__(self, files: _Checkpoint, config: ModelConfig, dtype: torch.dtype, device: str) -> None:
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
        attention, mlp = self._config.attention_bias, self._config.mlp_bias
        return LayerWeights(
            attention_norm=self._norm(at + "input_layernorm"),
            qkv=self._linear([at + f"self_attn.{name}_proj" for name in "qkv"], attention),
            o=self._linear([at + "self_attn.o_proj"], attention),
            mlp_norm=self._norm(at + "post_attention_layernorm"),
            gate_up=self._linear([at + "mlp.gate_proj", at + "mlp.up_proj"], mlp),
            down=self._linear([at + "mlp.down_proj"], mlp),
        )

    def _norm(self, name: str) -> Tensor:
        return self._files.read(name + ".weight").to(self._device, torch.float32)

    def _linear(self, names: list[str], bias: bool) -> Linear:
        return Linear(self._fused(names, "weight"), self._fused(names, "bias") if bias else None)

    def _fused(self, names: list[str], kind: str) -> Tensor:
        parts = [self._files.read(f"{name}.{kind}").to(self._device, self._dtype) for name in names]
        # A tensor read without conversion may be a view of the mapped file; one that stays must not depend on it.
        return torch.cat(parts) if len(parts) > 1 else parts[0].clone()


def _expected(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Each tensor that the decoder needs, with its shape."""
    hidden = config.hidden_size
    shapes = {"model.embed_tokens.weight": (config.vocab_size, hidden), "model.norm.weight": (hidden,)}
    if not config.tied:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    for i in range(config.layers):
        at = f"model.layers.{i}."
        shapes[at + "input_layernorm.weight"] = shapes[at + "post_attention_layernorm.weight"] = (hidden,)
        for name, rows, columns, bias in _matrices(config):
            shapes[f"{at}{name}_proj.weight"] = (rows, columns)
            if bias:
                shapes[f"{at}{name}_proj.bias"] = (rows,)
    return shapes


def _matrices(config: ModelConfig) -> Iterator[tuple[str, int, int, bool]]:
    """(name, out, in, has a bias) of a layer's matrices."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
    yield "self_attn.q", q, hidden, config.attention_bias
    yield "self_attn.k", kv, hidden, config.attention_bias
    yield "self_attn.v", kv, hidden, config.attention_bias
    yield "self_attn.o", hidden, q, config.attention_bias
    yield "mlp.gate", inner, hidden, config.mlp_bias
    yield "mlp.up", inner, hidden, config.mlp_bias
    yield "mlp.down", hidden, inner, config.mlp_bias
