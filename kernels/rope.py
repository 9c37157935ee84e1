"""Rotary position embedding over split halves: element i pairs with i + head_dim / 2 (the layout of Hugging Face)."""

import torch
from torch import Tensor


def rope_frequencies(theta: float, head_dim: int, device: torch.device | str = "cpu") -> Tensor:
    """theta^(-2i / head_dim) for i in 0 .. head_dim / 2 - 1: float32 [head_dim / 2].

    Source: Su et al., RoFormer (2021).
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64, device=device).to(torch.float32) / head_dim
    return 1.0 / theta**exponents


def rope_angles(positions: Tensor, frequencies: Tensor, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """What `rotate_` multiplies by at these positions.

    `positions`: int64 [tokens]; `frequencies`: float32 [rotary_dim / 2]; `scale`: of all results. Returns the cosines
    and the sines, the first half of the latter negated: float32 [tokens, 1, rotary_dim] each.
    """
    angles = torch.outer(positions.to(torch.float32), frequencies)
    cos, sin = angles.cos(), angles.sin()
    if scale != 1.0:
        cos, sin = cos.mul_(scale), sin.mul_(scale)
    return torch.cat((cos, cos), dim=-1).unsqueeze(1), torch.cat((-sin, sin), dim=-1).unsqueeze(1)


def rotate_(heads: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotates query and key heads in place, computing in float32.

    `heads`: [tokens, heads, rotary_dim], may be strided (the first elements of wider heads); `cos`, `sin`:
    [tokens, 1, rotary_dim], from `rope_angles`.
    """
    x = heads.to(torch.float32)
    swapped = x.roll(x.shape[-1] // 2, dims=-1)
    heads.copy_((x * cos).addcmul_(swapped, sin))
