"""The matrix products of a step: cuBLAS or our own kernels, by the committed table; or such as no batch changes."""

from collections.abc import Iterable

import torch
from torch import Tensor

from ...kernels.gpu.gemm_table import GemmTable, linear_
from ...kernels.gpu.invariant_gemm import invariant_linear_, invariant_workspace
from ..config import EngineOptions
from ..linear import Linear
from ..weights import Weights

PREFETCH = 2  # blocks of a weight that are asked for while the kernel in front ends


class Matrices:
    """out = x W^T + b, into memory that is given."""

    def __init__(self, weights: Weights, options: EngineOptions, dtype: torch.dtype, device: torch.device) -> None:
        pdl = dependent_launch(device)
        self._table = (
            GemmTable.packaged(device, pdl=pdl, prefetch=PREFETCH if pdl else 0)
            if device.type == "cuda"
            else GemmTable()
        )
        self._invariant = options.batch_invariant
        shapes = sorted({(linear.out_features, linear.in_features) for linear in _all(weights)})
        self._workspace = (
            invariant_workspace(device, shapes, options.token_budget, dtype)
            if self._invariant
            else self._table.workspace(device, shapes, options.token_budget, dtype)
        )

    def __call__(self, x: Tensor, linear: Linear, out: Tensor) -> None:
        """`x`: [rows, in], contiguous; `out`: [rows, out], contiguous."""
        if self._invariant:
            invariant_linear_(x, linear.weight(), linear.bias, out, self._workspace)
            return
        linear_(x, linear.weight(), linear.bias, out, self._table, self._workspace)


def dependent_launch(device: torch.device) -> bool:
    """Whether kernels may start while the one in front of them ends (Hopper's programmatic dependent launch)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def _all(weights: Weights) -> Iterable[Linear]:
    for layer in weights.layers:
        yield from (layer.qkv, layer.o, layer.gate_up, layer.down)
    yield weights.head
