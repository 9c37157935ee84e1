"""Random weights for any `config.json`, made on the device: to measure with, where there are no files to read."""

import hashlib
import json
from pathlib import Path

import torch
from torch import Tensor

from .config import EngineOptions
from .linear import Linear
from .model_config import ModelConfig
from .model_files import normalised_config
from .tensor_names import Matrix, matrices, norms
from .weights import LayerWeights, Weights

SEED = 20_240_711
BIAS_STD = 0.02
LOGITS_STD = 4.0  # so that the most likely token is clear


def dummy_weights(config: ModelConfig, dtype: torch.dtype, device: torch.device | str = "cpu") -> Weights:
    """Weights of the shapes that `config` names, the same at every call on the same kind of device.

    Matrices are normal with variance 1 / fan-in, so that a layer keeps its input's scale and the residual stream grows
    with the root of the layers, far from overflow in any dtype; norms are 1, their offset included.
    """
    return _Maker(config, dtype, torch.device(device)).make()


def dummy_fingerprint(path: Path, options: EngineOptions) -> str:
    """Identifies such a model as `model_files.fingerprint` does a real one, whose print it never equals.

    `path`: of the directory with config.json. Kinds of devices draw different numbers from one seed, so workers only
    share KV when theirs are of one kind.
    """
    kind = torch.cuda.get_device_name(options.device) if options.device_type == "cuda" else options.device_type
    content = json.dumps([normalised_config(path), "dummy", SEED, kind, options.dtype], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()


class _Maker:
    """Draws tensors in a fixed order from one generator."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        self._config = config
        self._dtype = dtype
        self._device = device
        self._generator = torch.Generator(device).manual_seed(SEED)

    def make(self) -> Weights:
        config = self._config
        shape, std = (config.vocab_size, config.hidden_size), LOGITS_STD * config.hidden_size**-0.5
        embedding = self._normal(shape, std)
        head = embedding if config.tied else self._normal(shape, std)
        layers = [self._layer() for _ in range(config.layers)]
        return Weights(embedding, layers, self._ones(config.hidden_size), Linear(head))

    def _layer(self) -> LayerWeights:
        config = self._config
        linear = {matrix.name: self._linear(matrix) for matrix in matrices(config)}
        norm = {name: self._ones(config.hidden_size) for name in norms(config.family)}
        qk_norm = self._ones(config.heads + config.kv_heads, config.head_dim) if config.family.qk_norm else None
        return LayerWeights.of(linear, norm, qk_norm)

    def _linear(self, matrix: Matrix) -> Linear:
        rows = sum(matrix.rows)
        weight = self._normal((rows, matrix.columns), matrix.columns**-0.5)
        return Linear(weight, self._normal((rows,), BIAS_STD) if matrix.bias else None)

    def _normal(self, shape: tuple[int, ...], std: float) -> Tensor:
        """In the engine's dtype."""
        empty = torch.empty(shape, dtype=self._dtype, device=self._device)
        return empty.normal_(0.0, std, generator=self._generator)

    def _ones(self, *shape: int) -> Tensor:
        """float32, as all norms."""
        return torch.ones(shape, dtype=torch.float32, device=self._device)
