"""Rotary frequencies of every kind that `rope_config.py` reads."""

import math

import torch
from torch import Tensor

from ..kernels.rope import rope_frequencies
from .rope_config import Rope


def frequencies(rope: Rope, device: torch.device | str = "cpu") -> Tensor:
    """Radians a position: float32 [rope.dim / 2]. In the operations of `transformers`, so that float32 agrees."""
    plain = rope_frequencies(rope.theta, rope.dim, device)
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "llama3":
        return _llama3(plain, rope)
    if rope.kind == "yarn":
        return _yarn(rope, device)
    if rope.kind == "longrope":
        return _longrope(rope, device)
    return plain


def _llama3(plain: Tensor, rope: Rope) -> Tensor:
    """Long waves are stretched by the factor, short ones kept, those between blended. Source: Llama 3.1 (2024)."""
    waves = 2 * math.pi / plain  # positions a turn
    longest, shortest = rope.original / rope.low, rope.original / rope.high
    scaled = torch.where(waves > longest, plain / rope.factor, plain)
    blend = (rope.original / waves - rope.low) / (rope.high - rope.low)
    blended = (1 - blend) * scaled / rope.factor + blend * scaled
    return torch.where((waves >= shortest) & (waves <= longest), blended, scaled)


def _yarn(rope: Rope, device: torch.device | str) -> Tensor:
    """A ramp over the dimensions from kept to stretched frequencies. Source: Peng et al., YaRN (2023)."""

    def dimension(turns: float) -> float:
        """Where a wave makes so many turns within the original length."""
        return rope.dim * math.log(rope.original / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.high), dimension(rope.low)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    high += 0.001 if low == high else 0  # no division by zero
    waves = rope.theta ** (torch.arange(0, rope.dim, 2, device=device).to(torch.float32) / rope.dim)
    ramp = torch.arange(rope.dim // 2, dtype=torch.float32, device=device).sub_(low).div_(high - low).clamp_(0, 1)
    kept = 1 - ramp
    return 1.0 / (rope.factor * waves) * (1 - kept) + 1.0 / waves * kept


def _longrope(rope: Rope, device: torch.device | str) -> Tensor:
    exponents = torch.arange(0, rope.dim, 2, dtype=torch.int64, device=device).to(torch.float32) / rope.dim
    return 1.0 / (torch.tensor(rope.divisors, dtype=torch.float32, device=device) * rope.theta**exponents)
