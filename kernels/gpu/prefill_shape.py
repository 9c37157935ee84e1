"""How prefill attention cuts its work: chosen by what a model fixes, never by what a step holds."""

from dataclasses import dataclass

import torch

MAX_PACK = 32  # query heads in a tile


@dataclass(frozen=True, slots=True)
class PrefillShape:
    """How the kernel cuts the work."""

    rows: int  # of a tile: tokens * packed query heads
    keys: int  # of a block; a power of two, as page sizes are
    warps: int
    stages: int
    pack: int  # query heads of one KV head in a tile; divides their number
    bulk: bool = False  # K and V by Hopper's bulk tensor copies; keys <= page_size
    held: bool = False  # queries in registers, not in shared memory
    hopper: bool = False  # the kernel in hopper_attention.py, for 16-bit types and compute capability 9.0

    @property
    def tokens(self) -> int:
        """Query tokens of a tile."""
        return self.rows // self.pack


def prefill_shape(
    heads: int,
    kv_heads: int,
    head_dim: int,
    page_size: int,
    dtype: torch.dtype,
    *,
    hopper: bool = False,
    packed: bool = False,
) -> PrefillShape:
    """The fastest measured one. Nothing else may enter the choice: results depend on it in the last bits.

    `hopper`: the device has compute capability 9.0; `packed`: for tiles of few tokens, query heads share one.
    """
    group = heads // kv_heads
    if hopper and not packed and dtype != torch.float32 and head_dim <= 128:
        return PrefillShape(rows=128, keys=128, warps=8, stages=3, pack=1, hopper=True)
    pack = max(n for n in range(1, min(group, MAX_PACK) + 1) if group % n == 0)
    if dtype == torch.float32:  # products without matrix units, in many registers
        wide = head_dim > 128
        return PrefillShape(rows=32, keys=16 if wide else 32, warps=4 if wide else 8, stages=1, pack=pack)
    if head_dim > 128:
        return PrefillShape(rows=128, keys=64, warps=8, stages=2, pack=pack)
    return PrefillShape(rows=128, keys=64, warps=8, stages=3, pack=pack)
