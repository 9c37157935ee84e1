"""Root-mean-square normalisation."""

import torch
from torch import Tensor
from torch.nn import functional


def rms_norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight, computed in float32, then rounded once to `dtype`.

    `x`: [rows, width], float32 (the residual stream); `weight`: [width], float32; returns [rows, width].
    Source: Zhang and Sennrich, Root Mean Square Layer Normalization (2019).
    """
    return functional.rms_norm(x, (x.shape[-1],), weight, eps).to(dtype)


def head_norm_(heads: Tensor, weight: Tensor, eps: float) -> None:
    """`rms_norm` of each head by itself, in place.

    `heads`: [tokens, heads, head_dim], may be strided; `weight`: [heads, head_dim], float32, a row a head.
    Source: Henry et al., Query-Key Normalization for Transformers (2020), with the root mean square.
    """
    heads.copy_(functional.rms_norm(heads.to(torch.float32), (heads.shape[-1],), None, eps).mul_(weight))
