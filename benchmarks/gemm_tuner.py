"""Times configurations of matrix products on the GPU: the part of `gpu_gemm.py` that measures."""

import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass

import torch
import triton
from gemm_candidates import candidates

from twostroke.kernels.gpu.gemm import Config, GemmWorkspace, gemm

CEILING = 4.24e12  # bytes/s, measured
ROTATED = 300e6  # bytes of copies of a weight, several times the L2 cache
GIVE_UP = 1.3  # times the best
EARLY_US = 1.2  # what starting before the kernel in front has ended is worth, at few rows: cuBLAS cannot
FEW_ROWS = 64
DTYPE = torch.bfloat16


def graph_us(launch: Callable[[int], None], copies: int, *, replays: int = 20, rounds: int = 3) -> float:
    """Microseconds of `launch(copy)`, the copies taken in turn within one CUDA graph; a median of rounds.

    On the current stream, which must not be the default one.
    """
    number = max(8, copies)
    launch(0)  # what is compiled, loaded or allocated at the first call
    torch.cuda.current_stream().synchronize()
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin()
    try:
        for i in range(number):
            launch(i % copies)
    finally:
        graph.capture_end()
    graph.replay()
    figures = []
    for _ in range(rounds):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(replays):
            graph.replay()
        end.record()
        end.synchronize()
        figures.append(start.elapsed_time(end) * 1e3 / (replays * number))
    return statistics.median(figures)


class Matrix:
    """A weight in as many copies as make the L2 cache useless, inputs for it, and what the product is in float32."""

    def __init__(self, name: str, n: int, k: int, rows: int) -> None:
        """`rows`: of the input, the most that are timed."""
        self.name, self.n, self.k = name, n, k
        self.nbytes = n * k * DTYPE.itemsize
        count = max(1 if self.nbytes > ROTATED * 2 else 2, -(-int(ROTATED) // self.nbytes))
        self.weights = [torch.randn(n, k, device="cuda").div_(k**0.5).to(DTYPE) for _ in range(count)]
        self.x = torch.randn(rows, k, device="cuda").to(DTYPE)
        self.out = torch.empty(rows, n, device="cuda", dtype=DTYPE)
        few = min(rows, 256)
        self.expected = self.x[:few].float() @ self.weights[0].float().T  # [few, n]

    def cublas_us(self, m: int) -> float:
        """Microseconds of `torch.mm`."""
        x, out = self.x[:m], self.out[:m]
        return graph_us(lambda i: torch.mm(x, self.weights[i].t(), out=out), len(self.weights))

    def check(self, m: int, launch: Callable[[int], None]) -> str:
        """What is wrong with a product, twice computed; "" if nothing."""
        self.out.fill_(torch.nan)
        launch(0)
        first = self.out[:m].clone()
        launch(0)
        error = (first.float() - self.expected[:m]).abs() - 4e-3 * self.expected[:m].abs()
        if not bool((error <= 4e-3).all()):
            return f"wrong by {error.nan_to_num(nan=torch.inf).max().item():.3g}"
        return "" if torch.equal(first, self.out[:m]) else "not repeatable"


@dataclass
class Point:
    """What came out for a weight and a number of rows."""

    matrix: Matrix
    m: int
    cublas_us: float
    config: Config | None = None  # the best of ours
    us: float = float("inf")

    @property
    def chosen(self) -> Config | None:
        """Ours, where it is worth it."""
        return self.config if self.us < self.cublas_us + (EARLY_US if self.m <= FEW_ROWS else 0) else None

    @property
    def best_us(self) -> float:
        """Of the choice."""
        return self.us if self.chosen else self.cublas_us

    def line(self) -> str:
        """For the terminal."""
        megabytes = self.matrix.nbytes / 1e6
        config = (
            "" if self.config is None else " ".join(f"{name}={value}" for name, value in asdict(self.config).items())
        )
        return (
            f"{self.matrix.name:8} {self.m:4} floor {self.matrix.nbytes / CEILING * 1e6:6.1f}"
            f"  cuBLAS {self.cublas_us:6.1f} us {megabytes / self.cublas_us:5.2f} TB/s"
            f"  ours {self.us:6.1f} us {megabytes / self.us:5.2f} TB/s  {'*' if self.chosen else ' '} {config}"
        )


class Tuner:
    """Times configurations; what was the best for a batch is tried first for the next."""

    def __init__(self) -> None:
        """The workspace grows as configurations need it."""
        self._workspace = GemmWorkspace(torch.device("cuda"), floats=1, counters=1)
        self._good: dict[str, list[Config]] = {}
        self.failed: dict[Config, str] = {}

    def launcher(self, matrix: Matrix, m: int, config: Config, *, compile_only: bool = False) -> Callable[[int], None]:
        """`launch(copy)` for a configuration."""
        floats, counters = config.partial_floats(m, matrix.n, matrix.k), config.counters(m, matrix.n)
        had = self._workspace
        if had.partials.numel() < floats or had.counters.numel() < counters:
            floats, counters = max(floats, had.partials.numel()), max(counters, had.counters.numel())
            self._workspace = GemmWorkspace(torch.device("cuda"), floats=floats, counters=counters)
        x, out, workspace = matrix.x[:m], matrix.out[:m], self._workspace
        return lambda i: gemm(x, matrix.weights[i], out, config=config, workspace=workspace, compile_only=compile_only)

    def compile(self, matrix: Matrix, rows: Sequence[int], threads: int) -> None:
        """Everything that `rows` will need of a matrix."""
        with ThreadPoolExecutor(threads) as pool, triton.AsyncCompileMode(pool, ignore_errors=True):
            for m in rows:
                for config in candidates(m, matrix.n, matrix.k):
                    self.launcher(matrix, m, config, compile_only=True)(0)

    def time(self, matrix: Matrix, m: int, config: Config, best: float) -> float:
        """Microseconds; infinity if it fails or is far from `best`."""
        try:
            launch = self.launcher(matrix, m, config)
            wrong = self.check(matrix, m, launch)
            if wrong:
                self.failed[config] = wrong
                return float("inf")
            first = graph_us(launch, len(matrix.weights), replays=3, rounds=1)
            return first if first > GIVE_UP * best else graph_us(launch, len(matrix.weights))
        except Exception as error:  # whatever a configuration cannot do: shared memory, registers, the compiler
            self.failed[config] = str(error).splitlines()[0][:160]
            return float("inf")

    def check(self, matrix: Matrix, m: int, launch: Callable[[int], None]) -> str:
        """What is wrong, also with the counters that every launch must leave at zero."""
        return matrix.check(m, launch) or ("counters left" if bool(self._workspace.counters.any()) else "")

    def point(self, matrix: Matrix, m: int) -> Point:
        """The best of all candidates."""
        point = Point(matrix, m, matrix.cublas_us(m))
        found = candidates(m, matrix.n, matrix.k)
        first = [config for config in self._good.get(matrix.name, []) if config in found]
        for config in dict.fromkeys([*first, *found]):
            us = self.time(matrix, m, config, min(point.us, point.cublas_us))
            if us < point.us:
                point.config, point.us = config, us
        if point.config is not None:
            self._good.setdefault(matrix.name, []).insert(0, point.config)
        return point
