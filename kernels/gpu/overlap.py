"""Programmatic dependent launch (PTX `griddepcontrol`): a kernel starts while the one in front of it ends."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents


@triton.jit
def after_the_one_in_front():
    """Waits until the kernel in front has ended and all that it wrote can be seen; the one behind may start at once.

    Returns 0, as a number that the compiler does not know: what depends on the wait is addressed with it (times a
    multiple of 16, which keeps accesses wide), since the instruction alone does not keep the compiler from moving a
    load ahead of it.
    """
    zero = tl.inline_asm_elementwise(
        "griddepcontrol.wait; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
    )
    gdc_launch_dependents()
    return zero * 128


@triton.jit
def start_with_weight(
    weight, first_row, first_element, n, k, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PREFETCH: tl.constexpr
):
    """Waits for the kernel in front; before that, asks L2 for a weight [n, k], which does not depend on it.

    Asked for: PREFETCH blocks of BLOCK_K elements of the rows from `first_row` on. Returns as the above.
    """
    if PREFETCH > 0:
        row = tl.minimum(tl.arange(0, BLOCK_N), n - 1 - first_row)
        at = weight + first_row.to(tl.int64) * k + row[:, None] * k
        for ahead in tl.static_range(PREFETCH):
            element = first_element + ahead * BLOCK_K + tl.arange(0, (BLOCK_K + 63) // 64) * 64  # lines of 128 bytes
            tl.inline_asm_elementwise(
                "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [at + tl.minimum(element, k - 1)[None, :]],
                dtype=tl.int32, is_pure=False, pack=1,
            )  # fmt: skip
    return after_the_one_in_front()
