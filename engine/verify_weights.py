"""The weights of a layer as the engine has them, beside the original's."""

from dataclasses import dataclass

import torch
from torch import Tensor

from .linear import Linear
from .model_config import ModelConfig
from .reference import Reference
from .tensor_names import matrices, norms
from .weights import Weights

ROUNDING = 2.0**-22


@dataclass(frozen=True, slots=True)
class Statistics:
    """Of one tensor's scale."""

    shape: tuple[int, ...]
    minimum: float
    maximum: float
    mean: float
    std: float
    absmax: float

    @classmethod
    def of(cls, tensor: Tensor) -> "Statistics":
        """`tensor`: any shape, any float type."""
        x = tensor.double()
        low, high = float(x.min()), float(x.max())
        std = float(x.std(correction=0))
        return cls(tuple(tensor.shape), low, high, float(x.mean()), std, max(abs(low), abs(high)))


@dataclass(frozen=True, slots=True)
class WeightCheck:
    """One tensor of the checkpoint."""

    name: str
    ours: Statistics
    original: Statistics | None  # None: it has no such tensor
    difference: float  # largest of an element; infinite where they cannot be compared
    reordered: bool  # not equal, but the same values in another order

    @property
    def ok(self) -> bool:
        """Whether they are equal, but for the rounding of a norm's offset that was added and taken away."""
        return self.difference <= ROUNDING


def check_weights(place: str, weights: Weights, config: ModelConfig, reference: Reference) -> list[WeightCheck]:
    """`place`: `embedding`, `layer N` or `logits`."""
    return [_check(name, tensor, reference.tensor(name)) for name, tensor in _tensors(place, weights, config).items()]


def _check(name: str, ours: Tensor, original: Tensor | None) -> WeightCheck:
    if original is None or original.shape != ours.shape:
        statistics = None if original is None else Statistics.of(original)
        return WeightCheck(name, Statistics.of(ours), statistics, float("inf"), False)
    mine, theirs = ours.to(torch.float32), original.to(torch.float32)
    difference = float((mine - theirs).abs().max())
    reordered = difference > ROUNDING and torch.equal(mine.flatten().sort().values, theirs.flatten().sort().values)
    return WeightCheck(name, Statistics.of(ours), Statistics.of(original), difference, reordered)


def _tensors(place: str, weights: Weights, config: ModelConfig) -> dict[str, Tensor]:
    """The engine's tensors by the checkpoint's names, taken apart and laid out as there."""
    offset = config.family.norm_offset
    if place == "embedding":
        return {"model.embed_tokens.weight": weights.embedding}
    if place == "logits":
        head = "model.embed_tokens.weight" if config.tied else "lm_head.weight"
        return {"model.norm.weight": weights.norm - offset, head: weights.head.weight()}
    number = int(place.removeprefix("layer "))
    layer, at = weights.layers[number], f"model.layers.{number}."
    found: dict[str, Tensor] = {
        f"{at}{stored}.weight": getattr(layer, name) - offset for name, stored in norms(config.family).items()
    }
    if layer.qk_norm is not None:
        found[f"{at}self_attn.q_norm.weight"] = layer.qk_norm[0] - offset
        found[f"{at}self_attn.k_norm.weight"] = layer.qk_norm[-1] - offset
    for matrix in matrices(config):
        linear: Linear = getattr(layer, matrix.name)
        parts = torch.split(linear.weight(), list(matrix.rows))
        found |= {f"{at}{name}.weight": part for name, part in zip(matrix.stored, parts, strict=True)}
        if linear.bias is not None:
            biases = torch.split(linear.bias, list(matrix.rows))
            found |= {f"{at}{name}.bias": part for name, part in zip(matrix.stored, biases, strict=True)}
    return found
