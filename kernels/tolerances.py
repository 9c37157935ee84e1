"""How far results may lie from their references: a kernel's from float64, a model's from float32."""

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


class ModelTolerance(NamedTuple):
    """Of a whole model against the same weights computed in float32."""

    relative: float  # |difference| / |reference| of a token's residual stream or logits, Euclidean
    regret: float  # of a greedy token: how far below the best its logit may be, in standard deviations of the logits


MODEL_TOLERANCES: dict[torch.dtype, ModelTolerance] = {
    torch.float32: ModelTolerance(5e-4, 1e-3),
    torch.float16: ModelTolerance(2e-2, 5e-2),
    torch.bfloat16: ModelTolerance(1e-1, 3e-1),
}
