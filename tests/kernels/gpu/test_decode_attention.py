"""Paged decode attention against a plain float64 reference."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from twostroke.kernels.gpu.decode_attention import DecodeScratch, decode_attention
from twostroke.kernels.gpu.decode_plan import DecodeLaunch, DecodePlan, decode_launch, plan_decode
from twostroke.kernels.tolerances import TOLERANCES

NAN = float("nan")


@dataclass
class Case:
    """A batch: `lengths` of its rows, 0 for a padding row. All that must not be read is NaN."""

    lengths: list[int]
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    page_size: int = 16
    window: int = 0
    cap: float = 0.0
    dtype: torch.dtype = torch.float32
    target_items: int = 6
    fixed: bool = False
    launch: DecodeLaunch | None = None
    max_rows: int = 0

    def build(self, device: torch.device, seed: int = 0) -> "Batch":
        """Random queries, keys and values; pages scattered, tables with junk behind each row's last page."""
        return Batch(self, device, torch.Generator(device).manual_seed(seed))


class Batch:
    """A case's tensors."""

    def __init__(self, case: Case, device: torch.device, random: torch.Generator) -> None:
        """`device`: of the tensors."""
        self.case, self.device = case, device
        rows, page = len(case.lengths), case.page_size
        counts = [-(-length // page) for length in case.lengths]
        total = sum(counts) + 2  # page 0 is the sink, the last belongs to nobody
        pages = (torch.randperm(total - 2, generator=random, device=device) + 1).int().split(counts)
        self.tables = torch.full((rows + 1, max(counts) + 1), total - 1, dtype=torch.int32, device=device)
        self.tables[0] = 0
        self.pool = torch.full((total, 2, case.kv_heads, page, case.head_dim), NAN, dtype=case.dtype, device=device)
        slots = []
        for row, (length, own) in enumerate(zip(case.lengths, pages, strict=True)):
            slot = rows - row if length else 0
            slots.append(slot)
            if length:
                self.tables[slot, : len(own)] = own
            low = max(0, length - case.window) if case.window else 0
            for n in range(low, length):
                self.pool[own[n // page], :, :, n % page].normal_(generator=random)
        self.slots = torch.tensor(slots, dtype=torch.int32, device=device)
        self.positions = torch.tensor([max(0, n - 1) for n in case.lengths], dtype=torch.int32, device=device)
        width = case.heads * case.head_dim
        qkv = torch.randn(rows, width + 2 * case.kv_heads * case.head_dim, generator=random, device=device)
        self.q = (2 * qkv).to(case.dtype)[:, :width]
        self.scale = case.head_dim**-0.5
        max_rows = case.max_rows or rows
        self.plan = DecodePlan(max_rows, target_items=case.target_items, device=device, fixed=case.fixed)
        self.scratch = DecodeScratch(self.plan.max_items, case.heads, case.head_dim, device=device)
        self.scratch.partial.fill_(NAN)
        self.scratch.max_sum.fill_(NAN)

    def run(self) -> Tensor:
        """[rows, heads * head_dim]"""
        case = self.case
        out = torch.full_like(self.q, NAN)
        plan_decode(self.plan, self.slots, self.positions, page_size=case.page_size, window=case.window)
        decode_attention(
            self.q,
            self.pool,
            self.tables,
            self.slots,
            self.positions,
            self.plan,
            self.scratch,
            out,
            kv_heads=case.kv_heads,
            page_size=case.page_size,
            scale=self.scale,
            cap=case.cap,
            window=case.window,
            launch=case.launch,
        )
        return out

    def reference(self) -> Tensor:
        """The same in float64, row by row."""
        case = self.case
        out = torch.zeros(self.q.shape, dtype=torch.float64, device=self.device)
        for row, length in enumerate(case.lengths):
            if not length:
                continue
            low = max(0, length - case.window) if case.window else 0
            at = torch.arange(low, length, device=self.device)
            pages = self.tables[self.slots[row], at // case.page_size]
            kv = self.pool[pages, :, :, at % case.page_size].double()  # [length, 2, kv_heads, head_dim]
            q = self.q[row].view(case.kv_heads, -1, case.head_dim).double()
            scores = torch.einsum("kgd,nkd->kgn", q, kv[:, 0]) * self.scale
            if case.cap:
                scores = case.cap * torch.tanh(scores / case.cap)
            out[row] = torch.einsum("kgn,nkd->kgd", scores.softmax(-1), kv[:, 1]).flatten()
        return out


def check(case: Case, device: torch.device) -> Tensor:
    """Runs it twice, the second time with what the first left behind."""
    batch = case.build(device)
    expected = batch.reference()
    tolerance = TOLERANCES[case.dtype]
    for _ in range(2):
        out = batch.run()
        torch.testing.assert_close(out.double(), expected, rtol=tolerance.relative, atol=tolerance.absolute)
    for row, length in enumerate(case.lengths):
        if not length:
            assert not out[row].any()
    return out


def around(page: int) -> list[int]:
    """Lengths around a page, with padding rows among them."""
    return [1, page - 1, 0, page, page + 1, 300, 0]


@pytest.mark.parametrize("page_size", [16, 32, 64, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_lengths_around_a_page(page_size: int, dtype: torch.dtype, device: torch.device) -> None:
    check(Case(around(page_size), page_size=page_size, dtype=dtype), device)


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("page_size", [16, 64])
def test_head_dims(head_dim: int, page_size: int, device: torch.device) -> None:
    check(Case([3, 130, 0, 77], head_dim=head_dim, page_size=page_size, dtype=torch.float16), device)


@pytest.mark.parametrize("group", [1, 2, 3, 4, 7, 8, 16, 20, 32])
@pytest.mark.parametrize("fused", [False, True])
def test_groups(group: int, fused: bool, device: torch.device) -> None:
    launch = decode_launch(64, 4)._replace(fused=fused)
    check(Case([5, 0, 150], heads=3 * group, kv_heads=3, page_size=32, launch=launch), device)


@pytest.mark.parametrize("window", [1, 5, 16, 33, 100, 1000])
@pytest.mark.parametrize(("page_size", "block"), [(16, 64), (32, 32), (64, 64), (128, 16), (128, 64)])
def test_windows(window: int, page_size: int, block: int, device: torch.device) -> None:
    launch = DecodeLaunch(block=block, warps=4, stages=2, fused=False)
    check(Case([1, 16, 0, 64, 90, 260], page_size=page_size, window=window, launch=launch), device)


@pytest.mark.parametrize("cap", [0.5, 5.0, 50.0])
def test_soft_cap(cap: float, device: torch.device) -> None:
    check(Case([1, 40, 0, 200], cap=cap), device)


def test_soft_cap_with_a_window(device: torch.device) -> None:
    check(Case([1, 40, 200], cap=20.0, window=50, page_size=32, dtype=torch.float16), device)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("target_items", [1, 2, 5, 40, 300])
def test_splits(target_items: int, fused: bool, device: torch.device) -> None:
    launch = decode_launch(64, 4)._replace(fused=fused)
    check(Case([300, 0, 17, 1, 129], target_items=target_items, launch=launch, max_rows=9), device)


@pytest.mark.parametrize("fused", [False, True])
def test_padding_alone(fused: bool, device: torch.device) -> None:
    check(Case([0, 0, 0], launch=decode_launch(64, 4)._replace(fused=fused)), device)


def test_large_scores_do_not_overflow(device: torch.device) -> None:
    batch = Case([200, 33], dtype=torch.float16, target_items=20).build(device)
    batch.q.mul_(100)
    out = batch.run()
    torch.testing.assert_close(out.double(), batch.reference(), rtol=4e-3, atol=4e-3)


def test_fixed_splits_make_a_row_independent_of_its_batch(device: torch.device) -> None:
    alone = Case([213], fixed=True, target_items=4).build(device)
    expected = alone.run()
    among = Case([300, 213, 0, 1, 90, 17], fixed=True, target_items=4, max_rows=8).build(device, seed=1)
    pages = alone.tables[1, : -(-213 // 16)].long()
    own = among.tables[among.slots[1], : len(pages)].long()
    among.pool[own] = alone.pool[pages]
    among.q[1] = alone.q[0]
    out = among.run()
    assert torch.equal(out[1], expected[0])
    torch.testing.assert_close(out.double(), among.reference(), rtol=1e-5, atol=1e-5)


def test_a_smaller_step_after_a_larger_one(device: torch.device) -> None:
    case = Case([300, 40, 5], max_rows=4)
    batch = case.build(device)
    batch.run()
    smaller = Case([70, 0], max_rows=4).build(device)
    smaller.plan, smaller.scratch = batch.plan, batch.scratch
    torch.testing.assert_close(smaller.run().double(), smaller.reference(), rtol=1e-5, atol=1e-5)


def test_what_does_not_fit_is_refused(device: torch.device) -> None:
    with pytest.raises(ValueError, match="rows and items"):
        DecodePlan(0, target_items=4, device=device)
    batch = Case([20, 30]).build(device)
    batch.plan = DecodePlan(1, target_items=4, device=device)
    with pytest.raises(ValueError, match="2 rows in a plan of 1"):
        batch.run()
    batch = Case([20, 30]).build(device)
    batch.scratch = DecodeScratch(4, 4, 64, device=device)
    with pytest.raises(ValueError, match="scratch"):
        batch.run()
    batch = Case([20, 30]).build(device)
    batch.pool = batch.pool[:, :, :1]
    with pytest.raises(ValueError, match="do not fit"):
        batch.run()
