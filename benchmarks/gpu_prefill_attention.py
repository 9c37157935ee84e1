"""Prefill attention on a GPU: shapes of the Triton kernel beside torch's fused kernels, in TFLOP/s.

`python benchmarks/gpu_prefill_attention.py [--shapes plain|hopper|none] [--json FILE]`. 32 query and 8 KV heads
of 128, bf16, causal, pages of 64. Every way is first compared with float32; one that is wrong or fails is named and not
timed. About 80 s.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import triton
from record import Recorder
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from twostroke.kernels.gpu.prefill_attention import prefill_attention, prefill_tiles
from twostroke.kernels.gpu.prefill_shape import PrefillShape, prefill_shape
from twostroke.kernels.gpu.sdpa import Attend, cudnn_attend, flash_attend, sdpa_attention

HEADS, KV_HEADS, HEAD_DIM, PAGE = 32, 8, 128, 64
GROUP, SCALE = HEADS // KV_HEADS, HEAD_DIM**-0.5
DTYPE, DEVICE = torch.bfloat16, "cuda"
LIMIT_S = 75.0  # after it only the engine's own way and the peers are timed
WORST = 1e-2  # |result - reference| / |reference|

# (sequences, cached tokens, tokens of the chunk)
POINTS = [(1, 0, 2048), (1, 0, 4096), (1, 0, 8192), (1, 0, 16384), (1, 8192, 8192), (16, 0, 2048)]

PLAIN = {
    "128x64": PrefillShape(128, 64, 8, 3, GROUP),
    "128x64, 2 stages": PrefillShape(128, 64, 8, 2, GROUP),
    "128x64, q held": PrefillShape(128, 64, 8, 3, GROUP, held=True),
    "128x64, bulk": PrefillShape(128, 64, 8, 3, GROUP, bulk=True),
    "128x64, bulk, 4 stages": PrefillShape(128, 64, 8, 4, GROUP, bulk=True),
    "128x64, a head a tile": PrefillShape(128, 64, 8, 3, 1),
    "128x128": PrefillShape(128, 128, 8, 2, GROUP),
    "128x128, q held": PrefillShape(128, 128, 8, 2, GROUP, held=True),
    "128x32, 4 warps": PrefillShape(128, 32, 4, 2, GROUP),
    "64x64, 4 warps": PrefillShape(64, 64, 4, 2, GROUP),
    "64x128, 4 warps": PrefillShape(64, 128, 4, 2, GROUP),
}


def hopper(keys: int = 128, stages: int = 3, pack: int = 1) -> PrefillShape:
    return PrefillShape(128, keys, 8, stages, pack, hopper=True)


HOPPER = {
    "hopper 128x128": hopper(),
    "hopper 128x128, 2 stages": hopper(stages=2),
    "hopper 128x128, 2 heads a tile": hopper(pack=2),
    "hopper 128x128, 4 heads a tile": hopper(pack=4),
    "hopper 128x64, 5 stages": hopper(keys=64, stages=5),
}
SHAPES = {"plain": PLAIN, "hopper": HOPPER, "none": {}}


@dataclass(frozen=True, slots=True)
class Point:
    """Some sequences' chunks in a pool, their own K and V also beside their queries."""

    sequences: int
    start: int
    count: int
    qkv: Tensor  # [sequences * count, (HEADS + 2 * KV_HEADS) * HEAD_DIM]
    pool: Tensor  # [pages, 2, KV_HEADS, PAGE, HEAD_DIM]
    tables: Tensor  # int32 [1 + sequences, pages]
    gathered: Tensor
    out: Tensor

    @property
    def name(self) -> str:
        many = f"{self.sequences} x " if self.sequences > 1 else ""
        return f"{many}{self.count}" + (f" over {self.start}" if self.start else "")

    @property
    def flops(self) -> float:
        pairs = self.count * self.start + self.count * (self.count + 1) / 2
        return 4.0 * HEADS * HEAD_DIM * pairs * self.sequences

    def parts(self) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v, [tokens, heads of its * HEAD_DIM] each."""
        q, k, v = self.qkv.split([HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM], dim=1)
        return q, k, v


def make(sequences: int, start: int, count: int) -> Point:
    generator = torch.Generator(DEVICE).manual_seed(sequences + start + count)
    width = (HEADS + 2 * KV_HEADS) * HEAD_DIM
    qkv = torch.randn(sequences * count, width, generator=generator, device=DEVICE, dtype=DTYPE)
    pages = (start + count) // PAGE
    total = 1 + sequences * pages
    pool = torch.randn(total, 2, KV_HEADS, PAGE, HEAD_DIM, generator=generator, device=DEVICE, dtype=DTYPE)
    tables = torch.zeros(1 + sequences, 512, dtype=torch.int32, device=DEVICE)
    order = 1 + torch.randperm(total - 1, generator=generator, device=DEVICE)
    tables[1:, :pages] = order.view(sequences, pages)
    own = qkv[:, HEADS * HEAD_DIM :].view(sequences, count // PAGE, PAGE, 2, KV_HEADS, HEAD_DIM)
    pool[tables[1:, start // PAGE : pages].long()] = own.permute(0, 1, 3, 4, 2, 5)
    gathered = torch.empty(2, KV_HEADS, max(start, 1), HEAD_DIM, device=DEVICE, dtype=DTYPE)
    out = torch.empty(sequences * count, HEADS * HEAD_DIM, device=DEVICE, dtype=DTYPE)
    return Point(sequences, start, count, qkv, pool, tables, gathered, out)


def reference(point: Point) -> Tensor:
    """In float32, a thousand queries of one KV head at a time."""
    q, result = point.parts()[0], torch.empty(point.out.shape, device=DEVICE)
    length, step = point.start + point.count, 1024
    for s in range(point.sequences):
        pages = point.tables[1 + s, : length // PAGE].long()
        kv = point.pool[pages].permute(1, 2, 0, 3, 4).reshape(2, KV_HEADS, length, HEAD_DIM).float()
        for head in range(KV_HEADS):
            columns = slice(head * GROUP * HEAD_DIM, (head + 1) * GROUP * HEAD_DIM)
            for i in range(0, point.count, step):
                rows = slice(s * point.count + i, s * point.count + i + step)
                seen = point.start + i + step
                queries = q[rows, columns].float().view(step, GROUP, HEAD_DIM).transpose(0, 1)
                scores = queries @ kv[0, head, :seen].T * SCALE
                later = torch.ones(step, seen, dtype=torch.bool, device=DEVICE).triu_(seen - step + 1)
                weights = scores.masked_fill_(later, float("-inf")).softmax(-1)
                result[rows, columns] = (weights @ kv[1, head, :seen]).transpose(0, 1).reshape(step, -1)
    return result


def paged(point: Point, shape: PrefillShape) -> Callable[[], object]:
    q = point.parts()[0]
    spans = [(1 + s, s * point.count, point.count, point.start) for s in range(point.sequences)]
    tiles = torch.tensor(prefill_tiles(spans, shape.tokens), dtype=torch.int32, device=DEVICE)
    sizes = {"heads": HEADS, "kv_heads": KV_HEADS, "page_size": PAGE}
    return lambda: prefill_attention(q, point.pool, point.tables, tiles, point.out, **sizes, scale=SCALE, shape=shape)


def by_span(point: Point, attend: Attend) -> Callable[[], object]:
    """As the engine would: span by span, the cached prefix gathered."""

    def run() -> None:
        for s in range(point.sequences):
            rows = slice(s * point.count, (s + 1) * point.count)
            q, k, v = (x[rows] for x in point.parts())
            sdpa_attention(
                q,
                k,
                v,
                point.pool,
                point.tables,
                1 + s,
                point.start,
                point.gathered,
                point.out[rows],
                heads=HEADS,
                kv_heads=KV_HEADS,
                scale=SCALE,
                attend=attend,
            )

    return run


def at_once(point: Point, backend: SDPBackend) -> Callable[[], object]:
    """All spans in one call of torch's SDPA."""
    q, k, v = (x.view(point.sequences, point.count, -1, HEAD_DIM).transpose(1, 2) for x in point.parts())
    out = point.out.view(point.sequences, point.count, HEADS, HEAD_DIM).transpose(1, 2)

    def run() -> None:
        with sdpa_kernel(backend):
            out.copy_(functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=SCALE, enable_gqa=True))

    return run


def ways(point: Point, shapes: dict[str, PrefillShape]) -> dict[str, Callable[[], object]]:
    """The engine's own first, the peers next, other shapes last. At 2k the copy of the peers' output is some 2%."""
    engine = prefill_shape(HEADS, KV_HEADS, HEAD_DIM, PAGE, DTYPE, hopper=torch.cuda.get_device_capability() == (9, 0))
    found = {"engine": paged(point, engine)}
    for name, attend in (("cudnn", cudnn_attend), ("flash", flash_attend)):
        found[f"{name}, span by span"] = by_span(point, attend)
    if point.start == 0 and point.sequences > 1:
        found["cudnn, at once"] = at_once(point, SDPBackend.CUDNN_ATTENTION)
        found["flash, at once"] = at_once(point, SDPBackend.FLASH_ATTENTION)
    return found | {name: paged(point, shape) for name, shape in shapes.items()}


def error(result: Tensor, expected: Tensor) -> float:
    return float((result.float() - expected).norm() / expected.norm())


def measure(point: Point, shapes: dict[str, PrefillShape], ends: float, console: Console) -> dict[str, float]:
    """TFLOP/s of each way that is right."""
    expected = reference(point)
    rates: dict[str, float] = {}
    for name, run in ways(point, shapes).items():
        if name in shapes and time.monotonic() > ends:
            continue
        try:
            point.out.fill_(float("nan"))
            run()
            wrong = error(point.out, expected)
            if not wrong < WORST:
                console.print(f"{point.name}: {name} is wrong by {wrong:.3g}", style="red")
                continue
            ms = triton.testing.do_bench(run, warmup=15, rep=60, return_mode="median")
            rates[name] = point.flops / ms / 1e9
        except Exception as fault:
            console.print(f"{point.name}: {name} failed: {str(fault)[:300]}", style="red")
    return rates


def first_call_ms() -> list[float]:
    """cuDNN at three lengths that it has not seen."""
    times = []
    for count in (2049, 2050, 3001):
        q = torch.randn(count, HEADS, HEAD_DIM, device=DEVICE, dtype=DTYPE)
        k = torch.randn(count, KV_HEADS, HEAD_DIM, device=DEVICE, dtype=DTYPE)
        torch.cuda.synchronize()
        begun = time.perf_counter()
        cudnn_attend(q, k, k, True, SCALE)
        torch.cuda.synchronize()
        times.append((time.perf_counter() - begun) * 1e3)
    return times


def record(recorder: Recorder, point: Point, rates: dict[str, float]) -> None:
    for name, rate in rates.items():
        peer = f"torch {torch.__version__} {name}" if name.startswith(("cudnn", "flash")) else None
        recorder.add(
            "prefill_attention",
            rate,
            "TFLOP/s",
            peer=peer,
            dtype="bfloat16",
            heads=HEADS,
            kv_heads=KV_HEADS,
            head_dim=HEAD_DIM,
            page_size=PAGE,
            batch=point.sequences,
            context=point.start + point.count,
            prefix=point.start,
            variant=None if peer else name,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="append records to this file")
    parser.add_argument("--shapes", choices=SHAPES, default="plain", help="beside the engine's own and the peers")
    arguments = parser.parse_args()
    console, ends = Console(width=150), time.monotonic() + LIMIT_S
    recorder = Recorder(str(arguments.json.resolve().with_suffix(""))) if arguments.json else None
    results: dict[str, dict[str, float]] = {}
    for point in (make(*sizes) for sizes in POINTS):
        rates = results[point.name] = measure(point, SHAPES[arguments.shapes], ends, console)
        if recorder:
            record(recorder, point, rates)
    table = Table("TFLOP/s", *results, title=torch.cuda.get_device_name())
    for name in dict.fromkeys(name for rates in results.values() for name in rates):
        table.add_row(name, *(f"{rates[name]:.0f}" if name in rates else "-" for rates in results.values()))
    console.print(table)
    console.print("cuDNN, first call at a new length, ms:", " ".join(f"{ms:.1f}" for ms in first_call_ms()))


if __name__ == "__main__":
    main()
