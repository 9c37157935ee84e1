"""How far a kernel's result may lie from its reference computed in float64: one table for all tests."""

from typing import NamedTuple

import torch


class Tolerance(NamedTuple):
    """|result - reference| <= absolute + relative * |reference|."""

    relative: float
    absolute: float


# 16-bit types: a rounding inside and one of the result; float32: sums of about a thousand terms of order 1.
TOLERANCES: dict[torch.dtype, Tolerance] = {
    torch.float32: Tolerance(1e-5, 1e-5),
    torch.float16: Tolerance(2e-3, 2e-3),
    torch.bfloat16: Tolerance(1.6e-2, 1.6e-2),
}
