"""Matrix products on the GPU: tunes the committed table (`--write`), records the bench `gemm` (`--record`).

    python benchmarks/gpu_gemm.py --seconds 150 --write          # the five matrices of Llama-3.1-8B, all batches
    python benchmarks/gpu_gemm.py --shapes qkv,o --m 1,8         # a look at two of them
    python benchmarks/gpu_gemm.py --shapes 4608x3584 --write     # any [n, k]; other entries of the table stay
    python benchmarks/gpu_gemm.py --m "" --large --invariant     # cuBLAS and the batch-invariant kernel at 1 to 8192
    python benchmarks/gpu_gemm.py --m 1,8 --overlap              # the choices again, starting early and prefetching

A product is timed in a CUDA graph over copies of the weight that do not fit the L2 cache together, on random data. A
configuration is first checked against float32 and against itself; one whose first timing is 1.3 times the best is given
up. Everything is compiled before, in threads. When `--seconds` are over, what is left keeps its old entries.

Predictions (H200; bytes of the weight over 4.24 TB/s: qkv 11.9 us, o 7.9, gate_up 55.4, down 27.7, head 248):
- qkv, o at m <= 8: cuBLAS has 48 to 96 tiles for 132 multiprocessors, reads 2.5-3 TB/s (18 and 13 us); a GEMV (m = 1)
  or shares for all multiprocessors should read 3.6-3.9, the rest being ramp and merge: 13.5 and 9.5 us.
- gate_up at m <= 64: bandwidth already: 57-59 us, 2-4% over cuBLAS. head: 252 us, about cuBLAS's.
- down at m <= 8: 29.5 us (K = 14336 is cut into 4 for each tile).
- m = 128: every tile reads x again: with 256 rows of the weight a block, L2 gives 1.5 bytes for each byte of weight,
  with 128 rows 2. At about 6 TB/s from L2: gate_up 66 us (cuBLAS about 91), down 33, qkv 15, o 10.5.
- m = 256: computing takes 76 us of gate_up at 787 TFLOP/s, and L2 gives 3 bytes for each byte of weight (~115 us).
  cuBLAS takes ~96 us with 1.7 waves of tiles; equal shares may give ~100. So cuBLAS stays for gate_up; qkv, o, down
  gain 5-15% from the missing partial wave.
- m >= 1024 stays with cuBLAS (677 TFLOP/s). The invariant kernel: 85% of cuBLAS's bandwidth at 1, 70% of its FLOPs at
  8192.
"""

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, replace

import torch
import triton
from gemm_tuner import DTYPE, Matrix, Point, Tuner, graph_us
from record import Recorder
from torch import Tensor

from twostroke.kernels.gpu.gemm import GemmWorkspace
from twostroke.kernels.gpu.gemm_table import PACKAGED
from twostroke.kernels.gpu.invariant_gemm import invariant_linear_, invariant_workspace

SHAPES = {
    "qkv": (6144, 4096),
    "o": (4096, 4096),
    "gate_up": (28672, 4096),
    "down": (4096, 14336),
    "head": (128256, 4096),
}
ROWS = (1, 8, 32, 64, 128, 256, 16, 4, 2, 48, 96, 192, 24, 160, 224)  # what matters most first: time may run out
LARGE = (1024, 2048, 8192)


def write(points: Sequence[Point]) -> None:
    """Merges the points into the committed table; a table of another GPU is replaced."""
    table = json.loads(PACKAGED.read_text())
    gpu = torch.cuda.get_device_name()
    entries = {(e["n"], e["k"], e["bits"], e["m"]): e for e in table["entries"] if table["gpu"] == gpu}
    for point in points:
        n, k, bits = point.matrix.n, point.matrix.k, DTYPE.itemsize * 8
        config = None if point.chosen is None else asdict(point.chosen)
        figures = {"us": round(point.best_us, 2), "cublas_us": round(point.cublas_us, 2)}
        entries[n, k, bits, point.m] = {"n": n, "k": k, "bits": bits, "m": point.m, "config": config, **figures}
    lines = ",\n".join("  " + json.dumps(entries[key]) for key in sorted(entries))
    head = json.dumps({"gpu": gpu, "torch": torch.__version__, "triton": triton.__version__})[:-1]
    PACKAGED.write_text(f'{head}, "entries": [\n{lines}\n]}}\n')


def record(points: Sequence[Point]) -> None:
    """Result lines: ours (what the table chooses) and cuBLAS."""
    recorder = Recorder("gpu")
    for point in points:
        where = {"matrix": f"{point.matrix.n}x{point.matrix.k}", "dtype": "bfloat16", "batch": point.m}
        recorder.add("gemm", point.best_us, "us", **where)
        recorder.add("gemm", point.cublas_us, "us", peer=f"cuBLAS (torch {torch.__version__})", **where)


def summary(points: Sequence[Point]) -> None:
    """A step's matrices of the 8B model, where all were measured."""
    for m in sorted({point.m for point in points}):
        here = {point.matrix.name: point for point in points if point.m == m}
        if not here.keys() >= SHAPES.keys():
            continue
        layers = {name: 1 if name == "head" else 32 for name in SHAPES}
        ours, cublas = (
            sum(times * getattr(here[name], field) for name, times in layers.items()) / 1e3
            for field in ("best_us", "cublas_us")
        )
        nbytes = sum(times * here[name].matrix.nbytes for name, times in layers.items())
        print(f"step of {m:3}: cuBLAS {cublas:.3f} ms, table {ours:.3f} ms, {nbytes / ours / 1e9:.2f} TB/s")


def large(matrix: Matrix, rows: Sequence[int], invariant: bool) -> None:
    """cuBLAS and the batch-invariant kernel at any number of rows."""
    for m in rows:
        us = matrix.cublas_us(m)
        flops = 2 * m * matrix.n * matrix.k / 1e6
        line = (
            f"{matrix.name:8} {m:4} cuBLAS {us:8.1f} us {flops / us:4.0f} TFLOP/s {matrix.nbytes / us / 1e6:5.2f} TB/s"
        )
        if invariant:
            workspace = invariant_workspace(matrix.x.device, [(matrix.n, matrix.k)], m, DTYPE)
            x, out = matrix.x[:m], matrix.out[:m]

            def launch(i: int, x: Tensor = x, out: Tensor = out, workspace: GemmWorkspace = workspace) -> None:
                invariant_linear_(x, matrix.weights[i], None, out, workspace)

            wrong = matrix.check(min(m, 256), launch) if m <= 256 else ""
            ours = graph_us(launch, len(matrix.weights), replays=5)
            line += (
                f"  invariant {ours:8.1f} us {flops / ours:4.0f} TFLOP/s {matrix.nbytes / ours / 1e6:5.2f} TB/s {wrong}"
            )
        print(line, flush=True)


def overlap(tuner: Tuner, point: Point) -> None:
    """The best configuration again, starting before the kernel in front has ended; that one is the same product."""
    if point.config is None:
        return
    figures = {
        f"pdl, {ahead} blocks ahead": tuner.time(
            point.matrix, point.m, replace(point.config, pdl=True, prefetch=ahead), float("inf")
        )
        for ahead in (0, 1, 2, 4)
    }
    print(f"{'':13} {point.us:.2f} us; " + "; ".join(f"{name} {us:.2f}" for name, us in figures.items()), flush=True)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=",".join(SHAPES), help="names or NxK, with commas")
    parser.add_argument("--m", default=",".join(map(str, ROWS)), help="rows, with commas")
    parser.add_argument("--seconds", type=float, default=600.0, help="stop tuning after")
    parser.add_argument("--threads", type=int, default=14, help="that compile")
    parser.add_argument("--write", action="store_true", help="into kernels/gpu/gemm_table.json")
    parser.add_argument("--record", action="store_true", help="into benchmarks/results/gpu.jsonl")
    parser.add_argument("--large", action="store_true", help="also time cuBLAS at 1024, 2048, 8192")
    parser.add_argument("--invariant", action="store_true", help="with --large, the batch-invariant kernel beside it")
    parser.add_argument("--overlap", action="store_true", help="also time the choices with early starts")
    return parser.parse_args()


def run(args: argparse.Namespace) -> None:
    """Does what the command line says."""
    started = time.monotonic()
    shapes = [(name, SHAPES.get(name) or tuple(map(int, name.split("x")))) for name in args.shapes.split(",")]
    rows = [int(m) for m in args.m.split(",") if m]
    most = max([*rows, *(LARGE if args.large else ())])
    torch.manual_seed(0)
    matrices = [Matrix(name, n, k, most) for name, (n, k) in shapes]
    tuner, points = Tuner(), list[Point]()
    for matrix in matrices if rows else ():
        tuner.compile(matrix, rows, args.threads)
    print(f"compiled after {time.monotonic() - started:.1f} s", flush=True)
    for m in rows:
        for matrix in matrices:
            if time.monotonic() - started > args.seconds:
                print(f"out of time before {matrix.name} at {m}")
                continue
            points.append(tuner.point(matrix, m))
            print(points[-1].line(), flush=True)
            if args.overlap:
                overlap(tuner, points[-1])
    for config, reason in tuner.failed.items():
        print(f"failed: {config}: {reason}")
    summary(points)
    if args.large:
        for matrix in matrices:
            large(matrix, [1, 8, 64, 256, *LARGE] if args.invariant else LARGE, args.invariant)
    if args.write:
        write(points)
    if args.record:
        record(points)


def main() -> None:
    """Tunes, reports."""
    args = arguments()
    with torch.cuda.stream(torch.cuda.Stream()):  # graphs are not captured on the default stream
        run(args)


if __name__ == "__main__":
    main()
