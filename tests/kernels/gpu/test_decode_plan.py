"""The split of a decode step's attention into work items."""

import math

import pytest
import torch

from twostroke.kernels.gpu.decode_plan import MANY_ROWS, DecodePlan, decode_launch, decode_target_items, plan_decode


@pytest.mark.parametrize("window", [0, 1, 70])
@pytest.mark.parametrize(("rows", "max_rows"), [(1, 1), (2, 512), (17, 20), (256, 256)])
def test_plan_covers_every_page_once_and_evenly(rows: int, max_rows: int, window: int, device: torch.device) -> None:
    random = torch.Generator().manual_seed(rows)
    lengths = torch.randint(0, 5000, (rows,), generator=random)
    lengths[torch.rand(rows, generator=random) < 0.2] = 0
    page, target = 64, 66
    plan = DecodePlan(max_rows, target_items=target, device=device)
    slots = (lengths > 0).int().to(device)
    positions = (lengths - 1).clamp(min=0).int().to(device)
    plan_decode(plan, slots, positions, page_size=page, window=window)
    items: list[list[int]] = plan.items[: plan.items_of(rows)].tolist()
    spans: list[list[int]] = plan.spans[:rows].tolist()
    firsts = [max(0, n - window) // page if window else 0 for n in lengths.tolist()]
    pages = [-(-n // page) - f if n else 0 for n, f in zip(lengths.tolist(), firsts, strict=True)]
    each = max(1, math.ceil(sum(pages) / target))
    at = 0
    for row in range(rows):
        count = max(1, -(-pages[row] // each))
        assert spans[row] == [at, count]
        page_at = firsts[row]
        for owner, slot, first, held, length, start, siblings, _ in items[at : at + count]:
            assert (owner, slot, start, siblings) == (row, int(lengths[row] > 0), at, count)
            assert length == max(1, int(lengths[row]))
            assert pages[row] == 0 or first == page_at
            assert held in (pages[row] // count, -(-pages[row] // count))
            assert held <= each
            page_at += held
        assert page_at - firsts[row] == pages[row]
        at += count
    assert all(item[0] == -1 and item[3] == 0 for item in items[at:])


def test_launch_fits_shared_memory_and_tl_dot() -> None:
    for head_dim in (64, 80, 96, 128, 256):
        for itemsize in (2, 4):
            launch = decode_launch(head_dim, itemsize, 8)
            padded = 1 << (head_dim - 1).bit_length()
            assert launch.block >= 16
            assert 2 * launch.block * padded * itemsize * launch.stages <= 200 * 1024
    assert decode_launch(128, 2, 8).block == 64
    assert decode_launch(128, 2, MANY_ROWS).stages < decode_launch(128, 2, MANY_ROWS - 1).stages
    assert decode_target_items(8, 132) == 66
    assert decode_target_items(1000, 132) == 1
