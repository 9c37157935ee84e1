"""The gate of a gated feed-forward layer."""

from torch import Tensor
from torch.nn import functional


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up.

    `gate_up`: [rows, 2 * inner], gate in the first half; returns [rows, inner]. Overwrites the gate.
    Source: Shazeer, GLU Variants Improve Transformer (2020).
    """
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate, inplace=True).mul(up)
