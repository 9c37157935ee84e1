"""Paged decode attention against a plain float64 reference."""

from dataclasses import dataclass, replace

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
    launch: DecodeLaunch | None = None
    max_rows: int = 0
    pdl: bool = False

    def build(self, device: torch.device) -> "Batch":
        """Its tensors."""
        return Batch(self, device)


class Batch:
    """Random queries, keys and values; pages scattered, tables with junk behind each row's last page."""

    def __init__(self, case: Case, device: torch.device) -> None:
        """`device`: of the tensors."""
        self.case, self.device = case, device
        random = torch.Generator(device).manual_seed(len(case.lengths))
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
            at = torch.arange(low, length, device=device)
            kv = torch.randn(len(at), 2, case.kv_heads, case.head_dim, generator=random, device=device)
            self.pool[own[at // page], :, :, at % page] = kv.to(case.dtype)
        self.slots = torch.tensor(slots, dtype=torch.int32, device=device)
        self.positions = torch.tensor([max(0, n - 1) for n in case.lengths], dtype=torch.int32, device=device)
        width = case.heads * case.head_dim
        qkv = torch.randn(rows, width + 2 * case.kv_heads * case.head_dim, generator=random, device=device)
        self.q = (2 * qkv).to(case.dtype)[:, :width]
        self.scale = case.head_dim**-0.5
        max_rows = case.max_rows or rows
        self.plan = DecodePlan(max_rows, target_items=case.target_items, device=device)
        self.scratch = DecodeScratch(self.plan.max_items, case.heads, case.head_dim, device=device)
        self.scratch.partial.fill_(NAN)
        self.scratch.max_sum.fill_(NAN)

    def run(self, out: Tensor | None = None) -> Tensor:
        """[rows, heads * head_dim]"""
        case = self.case
        if out is None:
            out = torch.full_like(self.q, NAN)
        plan_decode(self.plan, self.slots, self.positions, page_size=case.page_size, window=case.window)
        if case.pdl:
            self.q.add_(0)  # the kernel before must not be the plan's
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
            pdl=case.pdl,
        )
        return out

    def check(self, out: Tensor | None = None) -> None:
        """Against the reference; what padding rows get is exactly 0."""
        out, tolerance = self.run() if out is None else out, TOLERANCES[self.case.dtype]
        rtol, atol = tolerance.relative, tolerance.absolute
        torch.testing.assert_close(out.double(), self.reference(), rtol=rtol, atol=atol)
        assert not out[self.slots == 0].any()

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


def check(case: Case, device: torch.device) -> Batch:
    """One run of it against the reference."""
    batch = case.build(device)
    batch.check()
    return batch


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
    check(Case([3, 130, 0], head_dim=head_dim, page_size=page_size, dtype=torch.float16), device)


@pytest.mark.parametrize(
    ("group", "fused"), [(1, False), (2, True), (3, False), (4, True), (7, True), (8, False), (16, True), (20, True)]
)
def test_groups(group: int, fused: bool, device: torch.device) -> None:
    launch = decode_launch(64, 4, 8)._replace(fused=fused)
    check(Case([5, 0, 100], heads=2 * group, page_size=32, launch=launch, target_items=3), device)


@pytest.mark.parametrize("window", [1, 33, 100, 1000])
@pytest.mark.parametrize(("page_size", "block"), [(16, 64), (64, 64), (128, 32)])
def test_windows(window: int, page_size: int, block: int, device: torch.device) -> None:
    launch = DecodeLaunch(block=block, warps=4, stages=2, fused=True)
    check(Case([1, 16, 0, 64, 90, 260], page_size=page_size, window=window, launch=launch), device)


@pytest.mark.parametrize("cap", [0.5, 50.0])
def test_soft_cap(cap: float, device: torch.device) -> None:
    check(Case([1, 40, 0, 200], cap=cap), device)


def test_soft_cap_with_a_window(device: torch.device) -> None:
    check(Case([1, 40, 200], cap=20.0, window=50, page_size=32, dtype=torch.float16), device)


@pytest.mark.parametrize(("target_items", "fused"), [(1, False), (2, True), (5, False), (30, True)])
def test_splits_and_what_a_step_leaves_behind(target_items: int, fused: bool, device: torch.device) -> None:
    launch = decode_launch(64, 4, 8)._replace(fused=fused)
    batch = check(Case([300, 0, 17, 1, 129], target_items=target_items, launch=launch, max_rows=9), device)
    assert torch.equal(batch.run(), batch.run())
    assert not batch.scratch.arrived.any()


@pytest.mark.parametrize("fused", [False, True])
def test_padding_alone(fused: bool, device: torch.device) -> None:
    check(Case([0, 0, 0], launch=decode_launch(64, 4, 8)._replace(fused=fused)), device)


def test_large_scores_do_not_overflow(device: torch.device) -> None:
    batch = Case([200, 33], dtype=torch.float16, target_items=20).build(device)
    batch.q.mul_(100)
    out = batch.run()
    torch.testing.assert_close(out.double(), batch.reference(), rtol=4e-3, atol=4e-3)


def test_a_smaller_step_after_a_larger_one(device: torch.device) -> None:
    case = Case([300, 40, 5], max_rows=4)
    batch = case.build(device)
    batch.run()
    smaller = Case([70, 0], max_rows=4).build(device)
    smaller.plan, smaller.scratch = batch.plan, batch.scratch
    smaller.check()


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


FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
LONG = [(BF16, head_dim, page) for head_dim in (64, 80, 96, 128, 256) for page in (16, 32, 64, 128)]
LONG += [(FP32, 64, 16), (FP32, 256, 128), (FP16, 96, 32), (FP16, 128, 64)]


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "head_dim", "page_size"), LONG)
def test_long_and_ragged(dtype: torch.dtype, head_dim: int, page_size: int, device: torch.device) -> None:
    launch = decode_launch(head_dim, dtype.itemsize, 8)._replace(fused=page_size in (16, 64))
    case = Case([], 8, 2, head_dim, page_size, dtype=dtype, launch=launch, target_items=132)
    for lengths in ([1, 4096, 0, 32768], [page_size * 20 + 1, 5000, 31, 0, page_size - 1] * 6):
        check(replace(case, lengths=lengths), device)


@pytest.mark.gpu
@pytest.mark.parametrize("group", [1, 4, 16, 32])
@pytest.mark.parametrize(("window", "cap"), [(0, 0.0), (1024, 0.0), (4096, 50.0)])
def test_groups_with_windows_and_caps(group: int, window: int, cap: float, device: torch.device) -> None:
    launch = decode_launch(128, 2, 8)._replace(fused=window == 1024)
    check(Case([4000, 0, 1, 1024, 9000] * 4, 2 * group, 2, 128, 64, window, cap, BF16, 66, launch=launch), device)


@pytest.mark.gpu
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("pdl", [False, True])
def test_the_same_bits_every_time(fused: bool, pdl: bool, device: torch.device) -> None:
    launch = decode_launch(128, 2, 8)._replace(fused=fused)
    case = Case([8000, 300, 0, 4000, 70] * 8, 32, 8, 128, 64, dtype=BF16, target_items=264, launch=launch, pdl=pdl)
    batch = check(case, device)
    first = batch.run()
    for _ in range(200):
        assert torch.equal(batch.run(), first)
    assert not batch.scratch.arrived.any()


@pytest.mark.gpu
def test_pages_beyond_int32_offsets(device: torch.device) -> None:
    batch = Case([200, 130], 8, 8, 128, 64, dtype=BF16).build(device)
    pages = (1 << 31) // batch.pool[0].numel() + 100
    pool = torch.full((pages, *batch.pool.shape[1:]), NAN, dtype=BF16, device=device)
    pool[pages - len(batch.pool) :] = batch.pool  # 4.3 GB, the pages in use at its end
    batch.tables += pages - len(batch.pool)
    batch.pool = pool
    batch.check()


@pytest.mark.gpu
def test_a_captured_graph_follows_the_positions(device: torch.device) -> None:
    batch = Case([700, 64, 0, 300], 8, 2, 128, 64, dtype=BF16, target_items=66).build(device)
    out = torch.empty_like(batch.q)
    batch.run(out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        batch.run(out)
    for lengths in ([700, 64, 0, 300], [650, 1, 0, 256], [1, 0, 0, 65]):
        batch.case = replace(batch.case, lengths=lengths)
        batch.positions.copy_(torch.tensor([max(0, n - 1) for n in lengths]))
        batch.slots.mul_(torch.tensor([n > 0 for n in lengths], device=device))
        graph.replay()
        batch.check(out)
