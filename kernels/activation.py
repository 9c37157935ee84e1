"""The gates of gated feed-forward layers, and the soft cap."""

import torch
from torch import Tensor
from torch.nn import functional


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up.

    `gate_up`: [rows, 2 * inner], gate in the first half; returns [rows, inner]. Overwrites the gate.
    Source: Shazeer, GLU Variants Improve Transformer (2020).
    """
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate, inplace=True).mul(up)


def gelu_tanh_mul(gate_up: Tensor) -> Tensor:
    """gelu(gate) * up, with the tanh approximation of gelu.

    `gate_up`: [rows, 2 * inner], gate in the first half; returns [rows, inner].
    Source: Shazeer, GLU Variants Improve Transformer (2020).
    """
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.gelu(gate, approximate="tanh").mul_(up)


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """cap * tanh(x / cap), in float32.

    `x`: any shape and float type; `cap`: above 0. Source: Gemma Team, Gemma 2 (2024).
    """
    return x.to(torch.float32).div(cap).tanh_().mul_(cap)
