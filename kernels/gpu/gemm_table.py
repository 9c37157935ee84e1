"""Which kernel multiplies: cuBLAS or ours, and how cut, by a table that was tuned offline and is committed.

`benchmarks/gpu_gemm.py` writes the table. Nothing is measured because of it while serving: the choice depends on shape
and type alone.
"""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from .gemm import Config, GemmWorkspace, gemm

PREFETCHED_ROWS = 64  # most rows of a product that asks for its weight early
PACKAGED = Path(__file__).with_name("gemm_table.json")
NEAR = 1.0  # how far a shape may be from a tuned one to share its choice: |log2| of the ratios of n and of k, summed


@dataclass(frozen=True, slots=True)
class Entry:
    """The choice for one weight and a range of rows."""

    n: int
    k: int
    bits: int  # of an element: bf16 and fp16 are alike
    m: int  # rows it was tuned with; serves fewer, too, down to the next entry
    config: Config | None  # None: cuBLAS
    us: float = 0.0  # of the choice
    cublas_us: float = 0.0


class GemmTable:
    """Chooses a `Config`, or None for cuBLAS. Without entries, and with more rows than were tuned, always None."""

    def __init__(self, entries: Iterable[Entry] = (), *, pdl: bool = False, prefetch: int = 0) -> None:
        """`pdl`, `prefetch` (for few rows): as of `Config`, for all choices; they change no result."""
        self._pdl, self._prefetch = pdl, prefetch
        self._shapes: dict[tuple[int, int, int], dict[int, Config | None]] = {}  # by (n, k, bits), then by rows
        for entry in sorted(entries, key=lambda entry: entry.m):
            self._shapes.setdefault((entry.n, entry.k, entry.bits), {})[entry.m] = entry.config
        self._chosen: dict[tuple[int, int, int, torch.dtype], Config | None] = {}

    @classmethod
    def packaged(cls, device: torch.device, *, pdl: bool = False, prefetch: int = 0, path: Path = PACKAGED) -> Self:
        """The committed table, if it was tuned on this kind of GPU; else one without entries. ValueError: malformed."""
        table = json.loads(path.read_text())
        if device.type != "cuda" or torch.cuda.get_device_name(device) != table["gpu"]:
            return cls()
        return cls(read_entries(table), pdl=pdl, prefetch=prefetch)

    def choose(self, m: int, n: int, k: int, dtype: torch.dtype) -> Config | None:
        """For x [m, k] and a weight [n, k]; for a shape that was not tuned, what the nearest one got, if it is near."""
        key = (m, n, k, dtype)
        if key not in self._chosen:
            self._chosen[key] = self._find(m, n, k, dtype.itemsize * 8)
        return self._chosen[key]

    def workspace(
        self, device: torch.device, shapes: Sequence[tuple[int, int]], rows: int, dtype: torch.dtype
    ) -> GemmWorkspace:
        """Enough for every product of up to `rows` rows with weights of these shapes [n, k]."""
        floats = counters = 0
        for n, k in shapes:
            for m in range(1, rows + 1):
                config = self._find(m, n, k, dtype.itemsize * 8)
                if config is not None:
                    floats = max(floats, config.partial_floats(m, n, k))
                    counters = max(counters, config.counters(m, n))
        return GemmWorkspace(device, floats=floats, counters=counters)

    def _find(self, m: int, n: int, k: int, bits: int) -> Config | None:
        shape = self._nearest(n, k, bits)
        if shape is None:
            return None
        config = next((config for rows, config in self._shapes[shape].items() if rows >= m), None)
        if config is None:
            return None
        # Measured: it pays where a tile waits for its weight alone, not where each program reads a few rows of it.
        few = config.block_m > 1 and m <= PREFETCHED_ROWS
        return replace(config, pdl=self._pdl, prefetch=self._prefetch if few else 0)

    def _nearest(self, n: int, k: int, bits: int) -> tuple[int, int, int] | None:
        if (n, k, bits) in self._shapes:
            return n, k, bits
        near = [(distance, shape) for shape in self._shapes if (distance := _distance(n, k, bits, shape)) <= NEAR]
        return min(near)[1] if near else None


def _distance(n: int, k: int, bits: int, shape: tuple[int, int, int]) -> float:
    return math.inf if bits != shape[2] else abs(math.log2(n / shape[0])) + abs(math.log2(k / shape[1]))


def read_entries(table: dict[str, Any]) -> list[Entry]:
    """The entries of a table as it is in its file. Raises ValueError where one is malformed."""
    try:
        return [
            Entry(**{**entry, "config": Config(**entry["config"]) if entry["config"] else None})
            for entry in table["entries"]
        ]
    except (KeyError, TypeError) as error:
        raise ValueError(f"a malformed entry in a table of matrix products: {error}") from error


def linear_(
    x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, table: GemmTable, workspace: GemmWorkspace
) -> None:
    """out = x W^T + bias by whichever kernel the table names.

    `x`: [m, k]; `weight`: [n, k], contiguous; `bias`: [n] or None; `out`: [m, n]; of one dtype. Allocates nothing.
    """
    n, k = weight.shape
    config = table.choose(x.shape[0], n, k, x.dtype)
    if config is not None:
        gemm(x, weight, out, config=config, workspace=workspace, bias=bias)
    elif bias is None:
        torch.mm(x, weight.t(), out=out)
    else:
        torch.addmm(bias, x, weight.t(), out=out)
