"""Philox4x32-10: random bits as a pure function of a key and a counter, so that nothing has to be kept or replayed."""

import torch
from torch import Tensor

WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


def philox4x32(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """The four 32-bit output words, each an int64 tensor with values in 0 .. 2^32 - 1.

    `counter`, `key`: int64 tensors of 32-bit words that broadcast against each other.
    Source: Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3 (2011); the Random123 library.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        # 64-bit products wrap into the sign bit; shifts and masks take the halves out unsigned.
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1 = (p1 >> 32) & WORD ^ c1 ^ k0, p1 & WORD
        c2, c3 = (p0 >> 32) & WORD ^ c3 ^ k1, p0 & WORD
        k0, k1 = (k0 + _WEYL[0]) & WORD, (k1 + _WEYL[1]) & WORD
    return c0, c1, c2, c3


def gumbel_noise(seeds: Tensor, samples: Tensor, positions: Tensor, stream: int, indices: Tensor) -> Tensor:
    """Standard Gumbel noise, the same for the same five arguments whatever else is in the batch.

    `seeds`: int64 [rows], 64-bit keys; `samples`, `positions`: int64 [rows]; `stream`: tells uses of one position
    apart; `indices`: int64 [rows, n] or [n]. Returns float64 [rows, n], between -3.1 and 22.9.
    The counter is (index, stream, position, sample).
    """
    seed, zero = seeds.unsqueeze(1), torch.zeros_like(indices)
    counter = (indices, zero + stream, zero + positions.unsqueeze(1), zero + samples.unsqueeze(1))
    bits = philox4x32(counter, (seed & WORD, (seed >> 32) & WORD))[0]
    uniform = (bits.to(torch.float64) + 0.5) * 2.0**-32  # never 0, never 1
    return uniform.log().neg_().log_().neg_()
