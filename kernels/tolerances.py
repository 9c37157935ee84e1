"""How far a kernel's result may lie from its reference computed in float64: one table for all tests."""

from typing import NamedTuple

import torch


class Tolerance(NamedTuple):
    """|result - reference| <= absolute + relative * |reference|."""

    relative: float
    absolute: float


# Half a unit in the last place, thrice: inputs as given, one rounding inside, one of the result.
TOLERANCES: dict[torch.dtype, Tolerance] = {
    torch.float32: Tolerance(1e-5, 2e-6),
    torch.float16: Tolerance(2e-3, 2e-3),
    torch.bfloat16: Tolerance(1.6e-2, 1.6e-2),
}
