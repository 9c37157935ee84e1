"""Sampling noise on the GPU: the words of `kernels/philox.py`."""

import triton
import triton.language as tl


@triton.jit
def gumbel(seed, sample, position, STREAM: tl.constexpr, indices):
    """Standard Gumbel noise, float64 like `indices`, of the counter (index, stream, position, sample).

    `seed`: int64; `sample`, `position`: int32; `indices`: int32, any shape. The same as `kernels/philox.gumbel_noise`.
    """
    zero = indices * 0
    bits, _, _, _ = tl.philox(seed, indices, zero + STREAM, zero + position, zero + sample)
    uniform = (bits.to(tl.float64) + 0.5) * 2.3283064365386963e-10  # 2^-32: never 0, never 1
    return -tl.log(-tl.log(uniform))
