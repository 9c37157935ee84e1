"""Paged decode attention on one GPU: launches and splits tried, beside a device copy of the same run.

`python benchmarks/gpu_decode_attention.py [--json FILE]`, under a minute. 32 query and 8 KV heads of 128, bf16, pages
of 64 tokens scattered over a pool of 5 GB of random numbers. Each figure is that of a layer (kernel and merge) in a
CUDA graph of many layers with pages of their own, so that the L2 cache holds none of them; results are checked first.
"""

import argparse
import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from record import Recorder
from torch import Tensor

from twostroke.kernels.gpu.decode_attention import DecodeScratch, decode_attention
from twostroke.kernels.gpu.decode_plan import DecodeLaunch, DecodePlan, decode_launch, decode_target_items, plan_decode
from twostroke.kernels.tolerances import TOLERANCES

HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE = 32, 8, 128, 64
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # a CPU is for a look at the script
DTYPE = torch.bfloat16 if DEVICE.type == "cuda" else torch.float16
POOL_PAGES = 20480 if DEVICE.type == "cuda" else 400  # element offsets beyond 2^31
TOKEN_BYTES = 2 * KV_HEADS * HEAD_DIM * 2
POINTS = [(1, 1024), (8, 1024), (32, 1024), (64, 1024), (128, 1024), (256, 1024), (32, 8192), (128, 4096)]
LAUNCHES = [
    *(DecodeLaunch(64, warps, stages, fused) for fused in (False, True) for warps, stages in ((4, 2), (4, 3), (2, 3))),
    DecodeLaunch(64, 4, 4, False),
    DecodeLaunch(32, 4, 4, False),
    DecodeLaunch(128, 4, 2, False),
]
ITEMS = (0.5, 0.75, 1, 1.5, 2, 3, 4, 8)  # times a multiprocessor's share: items * KV heads / multiprocessors / 4
BUDGET = 48.0  # seconds; what is then left to try is skipped


@dataclasses.dataclass(frozen=True)
class Variant:
    """One way to run it."""

    launch: DecodeLaunch
    items: int
    pdl: bool = False

    def __str__(self) -> str:
        """Short, for the table."""
        how = "fused" if self.launch.fused else "two kernels"
        block, warps, stages, _ = self.launch
        return f"block {block:3d} warps {warps} stages {stages} {how:11s} items {self.items:4d}{' pdl' * self.pdl}"


class Point:
    """A batch of rows of these lengths, with tables for several layers."""

    def __init__(self, pool: Tensor, lengths: Sequence[int]) -> None:
        """`pool`: [pages, 2, kv_heads, page_size, head_dim]."""
        self.pool, self.lengths, rows = pool, lengths, len(lengths)
        self.nbytes = sum(lengths) * TOKEN_BYTES
        self.layers = max(2, min(64, 2**29 // self.nbytes)) if DEVICE.type == "cuda" else 1
        counts = [-(-length // PAGE_SIZE) for length in lengths]
        self.tables = torch.zeros(self.layers, rows + 1, max(counts), dtype=torch.int32, device=DEVICE)
        for table in self.tables:
            own = (torch.randperm(len(pool) - 1, device=DEVICE)[: sum(counts)] + 1).int().split(counts)
            for row, pages in enumerate(own):
                table[row + 1, : len(pages)] = pages
        self.slots = torch.arange(1, rows + 1, dtype=torch.int32, device=DEVICE)
        self.positions = torch.tensor(lengths, dtype=torch.int32, device=DEVICE) - 1
        # Queries of deviation 4, so that few keys matter and the results are not all near 0.
        qkv = 4 * torch.randn(rows, (HEADS + 2 * KV_HEADS) * HEAD_DIM, device=DEVICE)
        self.q = qkv.to(DTYPE)[:, : HEADS * HEAD_DIM]
        self.out = torch.empty(rows, HEADS * HEAD_DIM, dtype=DTYPE, device=DEVICE)
        self.expected = torch.stack([self._reference(row) for row in range(rows)])

    def _reference(self, row: int) -> Tensor:
        """A row of the first layer in float32: [heads * head_dim]"""
        length = self.lengths[row]
        kv = self.pool[self.tables[0, row + 1, : -(-length // PAGE_SIZE)].long()].transpose(0, 1)
        k, v = kv.transpose(1, 2).reshape(2, KV_HEADS, -1, HEAD_DIM)[:, :, :length].float()
        q = self.q[row].view(KV_HEADS, -1, HEAD_DIM).float()
        return torch.bmm(torch.softmax(torch.bmm(q, k.mT) * HEAD_DIM**-0.5, -1), v).flatten()

    def prepared(self, variant: Variant) -> Callable[[], None]:
        """All layers of one step, after a check of the first."""
        plan = DecodePlan(len(self.lengths), target_items=variant.items, device=DEVICE)
        scratch = DecodeScratch(plan.max_items, HEADS, HEAD_DIM, device=DEVICE)

        def layer(index: int, pdl: bool) -> None:
            decode_attention(
                self.q,
                self.pool,
                self.tables[index],
                self.slots,
                self.positions,
                plan,
                scratch,
                self.out,
                kv_heads=KV_HEADS,
                page_size=PAGE_SIZE,
                scale=HEAD_DIM**-0.5,
                cap=0.0,
                window=0,
                launch=variant.launch,
                pdl=pdl,
            )

        def step() -> None:
            for index in range(self.layers):
                layer(index, variant.pdl)

        plan_decode(plan, self.slots, self.positions, page_size=PAGE_SIZE, window=0)
        relative, absolute = TOLERANCES[DTYPE]
        for _ in range(2):  # the second time with what the first left behind
            self.out.fill_(float("nan"))
            layer(0, variant.pdl)
            torch.testing.assert_close(self.out.float(), self.expected, rtol=relative, atol=absolute)
        return step

    def seconds(self, variant: Variant) -> float:
        """Of one layer."""
        return seconds(self.prepared(variant)) / self.layers


def seconds(step: Callable[[], object]) -> float:
    """The median of 9 replays of it as a CUDA graph."""
    if DEVICE.type != "cuda":
        start = time.perf_counter()
        step()
        return time.perf_counter() - start
    torch.cuda.synchronize()
    graph, times = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        step()
    graph.replay()
    for _ in range(9):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times)


def copy_rate() -> float:
    """Bytes a second read and written by a copy of 1 GiB."""
    source, target = torch.randint(
        255, (2, 2**30 if DEVICE.type == "cuda" else 2**20), dtype=torch.uint8, device=DEVICE
    )
    return 2 * source.nbytes / seconds(lambda: target.copy_(source))


def sweep(point: Point, usual: Variant, share: int, deadline: float) -> dict[Variant, float]:
    """Seconds a layer: the engine's own choice, its launches, then splits of the best launch, then dependent launch."""
    taken = {usual: point.seconds(usual)}

    def best() -> Variant:
        return min(taken, key=lambda variant: taken[variant])

    def attempt(variant: Variant) -> None:
        if variant not in taken and time.monotonic() < deadline:
            taken[variant] = point.seconds(variant)

    for launch in LAUNCHES:
        attempt(dataclasses.replace(usual, launch=launch))
    first = best()
    for factor in ITEMS:
        attempt(dataclasses.replace(first, items=max(1, int(factor * share))))
    for variant in (usual, best()) if DEVICE.type == "cuda" else ():
        attempt(dataclasses.replace(variant, pdl=True))
    return taken


def mixed(rows: int) -> list[int]:
    """Lengths of equal density in their logarithm, from 128 to 16384, in no order."""
    random = torch.Generator().manual_seed(rows)
    return [int(length) for length in 128 * 128 ** torch.rand(rows, generator=random)]


def main() -> None:
    """Checks, measures, prints, records."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="append records here, not to results/gpu.jsonl")
    args = parser.parse_args()
    torch.manual_seed(0)
    gpu = DEVICE.type == "cuda"
    deadline = time.monotonic() + BUDGET
    pool = torch.randn(POOL_PAGES, 2, KV_HEADS, PAGE_SIZE, HEAD_DIM, dtype=DTYPE, device=DEVICE)
    share = decode_target_items(KV_HEADS, torch.cuda.get_device_properties(DEVICE).multi_processor_count if gpu else 2)
    recorder, copy = Recorder("gpu", args.json), copy_rate()
    print(f"copy {copy / 1e12:.3f} TB/s; the engine's choice first")
    batches = [(rows, str(context), [context] * rows) for rows, context in POINTS] + [(64, "mixed", mixed(64))]
    for rows, context, lengths in batches if gpu else [(2, "300", [300, 77])]:
        usual = Variant(decode_launch(HEAD_DIM, DTYPE.itemsize, rows), share)
        point = Point(pool, lengths)
        taken = sweep(point, usual, share, deadline)
        ranked = sorted(taken, key=lambda variant: taken[variant])
        print(f"{rows} x {context}: {len(taken)} tried, {point.nbytes / 1e6:.0f} MB a layer")
        for variant in dict.fromkeys((usual, *ranked[:4], ranked[-1])):
            rate = point.nbytes / taken[variant]
            print(
                f"  {variant!s:62s} {taken[variant] * 1e6:8.2f} us {rate / 1e12:6.3f} TB/s, {rate / copy:.3f} of copy"
            )
        recorder.add(
            "decode_attention",
            point.nbytes / taken[usual] / 1e12,
            "TB/s",
            dtype="bfloat16",
            kv_dtype="bfloat16",
            batch=rows,
            context=context if context == "mixed" else int(context),
            page_size=PAGE_SIZE,
            figures={
                "us": round(taken[usual] * 1e6, 2),
                "copy_tb_s": round(copy / 1e12, 3),
                "best_tb_s": round(point.nbytes / taken[ranked[0]] / 1e12, 4),
                "best": str(ranked[0]),
            },
        )


if __name__ == "__main__":
    main()
