"""The choice of a kernel for a product."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from twostroke.kernels.gpu.gemm import Config
from twostroke.kernels.gpu.gemm_table import PACKAGED, Entry, GemmTable, linear_, read_entries

FIRST = Config(16, 64, 32, 5, 4, 3)
SECOND = Config(32, 64, 64, 3, 4, 3)
ENTRIES = [
    Entry(96, 64, 16, 16, SECOND),
    Entry(96, 64, 16, 4, FIRST),
    Entry(96, 64, 16, 8, None),
    Entry(4096, 64, 16, 16, SECOND),
]


def test_choice_by_rows_and_shape() -> None:
    table = GemmTable(ENTRIES)
    chosen = {m: table.choose(m, 96, 64, torch.bfloat16) for m in (1, 4, 5, 8, 9, 16, 17)}
    assert chosen == {1: FIRST, 4: FIRST, 5: None, 8: None, 9: SECOND, 16: SECOND, 17: None}
    assert table.choose(1, 96, 64, torch.float16) == FIRST
    assert table.choose(1, 96, 64, torch.float32) is None
    assert GemmTable().choose(1, 96, 64, torch.bfloat16) is None
    assert GemmTable(ENTRIES, pdl=True, prefetch=2).choose(4, 96, 64, torch.bfloat16) == replace(
        FIRST, pdl=True, prefetch=2
    )


def test_near_shapes_share_a_choice() -> None:
    table = GemmTable(ENTRIES)
    assert table.choose(1, 100, 60, torch.bfloat16) == FIRST
    assert table.choose(1, 5000, 64, torch.bfloat16) == SECOND
    assert table.choose(1, 640, 64, torch.bfloat16) is None  # far from both


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("m", [1, 7, 12, 40])
def test_linear(m: int, biased: bool, device: torch.device) -> None:
    """cuBLAS (or the CPU's) and ours agree, in a workspace that the table measured."""
    table = GemmTable(ENTRIES)
    x, weight = torch.randn(m, 64).to(device, torch.float16), torch.randn(96, 64).to(device, torch.float16) / 8
    bias = torch.randn(96).to(device, torch.float16) if biased else None
    out = torch.full((m, 96), torch.nan, dtype=torch.float16, device=device)
    linear_(x, weight, bias, out, table, table.workspace(device, [(96, 64)], 40, torch.float16))
    expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    torch.testing.assert_close(out.double(), expected, rtol=2e-3, atol=2e-3)


def test_workspace_covers_every_choice() -> None:
    table, device = GemmTable(ENTRIES), torch.device("cpu")
    workspace = table.workspace(device, [(96, 64), (4096, 64)], 16, torch.bfloat16)
    assert workspace.partials.numel() == max(
        FIRST.partial_floats(4, 96, 64), SECOND.partial_floats(16, 96, 64), SECOND.partial_floats(16, 4096, 64)
    )
    assert workspace.counters.numel() == 64
    assert table.workspace(device, [(96, 64)], 16, torch.float32).partials.numel() == 1


def test_the_committed_table(device: torch.device) -> None:
    """It reads, and is only for the GPU that it was tuned on."""
    table = json.loads(PACKAGED.read_text())
    entries = read_entries(table)
    assert len({(entry.n, entry.k, entry.bits, entry.m) for entry in entries}) == len(entries)
    assert all(entry.us <= entry.cublas_us + 1.2 for entry in entries if entry.config)  # an early start is worth that
    assert GemmTable.packaged(torch.device("cpu")).choose(1, 4096, 4096, torch.bfloat16) is None
    GemmTable.packaged(device)


def test_malformed(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="malformed"):
        read_entries({"entries": [{"n": 1, "m": 2, "config": {"block_m": 1}}]})
    with pytest.raises(ValueError, match="malformed"):
        read_entries({"entries": [{"n": 1}]})
