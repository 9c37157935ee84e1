"""Philox4x32-10: random bits as a pure function of a key and a counter, so that nothing has to be kept or replayed."""

import torch
from torch import Tensor

WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


def philox4x32(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """The four 32-bit output words, each an int64 tensor with values in 0 .. 2^32 - 1.

    `counter`, `key`: 32-bit words in int64 tensors of one shape.
    Source: Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3 (2011); the Random123 library.
    """
    (c0, c1, c2, c3), (k0, k1) = counter, key
    pair = (2,) + (1,) * c0.dim()
    multipliers = torch.tensor(_MULTIPLIERS, device=c0.device).view(pair)
    weyl = torch.tensor(_WEYL, device=c0.device).view(pair)
    even, odd, keys = torch.stack((c0, c2)), torch.stack((c1, c3)), torch.stack((k0, k1))
    for _ in range(_ROUNDS):
        # The upper halves of `odd` and `keys` may hold anything. Products wrap into the sign bit; masks undo that.
        product = (even * multipliers).flip(0)
        even = (product >> 32).bitwise_xor_(odd).bitwise_xor_(keys).bitwise_and_(WORD)
        odd = product
        keys = keys + weyl
    return even[0], odd[0] & WORD, even[1], odd[1] & WORD


def gumbel_noise(seeds: Tensor, samples: Tensor, positions: Tensor, stream: int, indices: Tensor) -> Tensor:
    """Standard Gumbel noise, the same for the same five arguments whatever else is in the batch.

    `seeds`: int64 [rows], 64-bit keys; `samples`, `positions`: int64 [rows]; `stream`: tells uses of one position
    apart; `indices`: int64 [rows, n] or [n]. Returns float64 [rows, n], between -3.1 and 22.9.
    The counter is (index, stream, position, sample).
    """
    shape = (seeds.shape[0], indices.shape[-1])
    low, high, at, of = (x.unsqueeze(1).expand(shape) for x in (seeds & WORD, (seeds >> 32) & WORD, positions, samples))
    bits = philox4x32((indices.expand(shape), torch.full_like(at, stream), at, of), (low, high))[0]
    uniform = (bits.to(torch.float64) + 0.5) * 2.0**-32  # never 0, never 1
    return uniform.log().neg_().log_().neg_()
