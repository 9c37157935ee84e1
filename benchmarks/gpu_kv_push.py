"""KV pushed by CUDA IPC: how fast a layer goes, what it costs the host and the prompt, and what is left to wait for.

`python benchmarks/gpu_kv_push.py [speed host prefill]`: two processes; the pool is on the second GPU where there is one
(--peer). Definitions: docs/benchmarking.md, bench `kv_push`.
"""

import argparse
import contextlib
import itertools
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from bench_engine import Bench, add_engine_arguments, built, model_name, pages_for
from record import Recorder, place
from rich.console import Console
from rich.table import Table

from twostroke.engine.batch import LayerHook
from twostroke.engine.model_config import ModelConfig
from twostroke.engine.request import ChunkProgress, Request, SamplingParams, SequenceKey, Work
from twostroke.kvtransfer.cuda_ipc import CudaIpcTransport
from twostroke.kvtransfer.cuda_pool import CudaPool, PeerCudaPool
from twostroke.kvtransfer.cuda_source import CudaSource
from twostroke.kvtransfer.messages import Copy
from twostroke.kvtransfer.page_batch import LayersAt, PageBatch
from twostroke.kvtransfer.pool_pages import pool_bytes
from twostroke.services.load.statistics import percentile

PARTS = ("speed", "host", "prefill")
GOALS = {"speed": ">= 350", "host": "<= 50", "lost": "<= 3", "digests": "<= 1", "hidden": ">= 96"}
INCARNATION = 0xD
MODES = ("none", "push", "no digests", "events only")


@dataclass(frozen=True, slots=True)
class Shape:
    """A pool."""

    layers: int
    pages: int
    page_bytes: int

    @property
    def nbytes(self) -> int:
        """In all."""
        return self.layers * self.pages * self.page_bytes


@contextlib.contextmanager
def owner(device: str, shape: Shape) -> Iterator[bytes]:
    """A process that has a pool; its descriptor."""
    words = [sys.executable, __file__, "--own", str(shape.nbytes), "--peer", device]
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    if process.stdin is None or process.stdout is None:
        raise RuntimeError("the owner of the pool has no pipes")
    try:
        yield bytes.fromhex(process.stdout.readline())
    finally:
        process.stdin.close()  # so it ends
        process.wait(60)


def own(device: str, nbytes: int) -> None:
    """That process."""
    pool = CudaPool.create(nbytes, device=device, incarnation=INCARNATION)
    print(pool.descriptor.hex(), flush=True)
    sys.stdin.read()


class Pusher:
    """A pool of ours, joined with the owner's."""

    def __init__(
        self,
        pages: torch.Tensor,  # [layers, pages, page_bytes] uint8
        descriptor: bytes,
        theirs: Shape,
    ) -> None:
        self.source = CudaSource(pages)
        pool = PeerCudaPool.open(descriptor, device=pages.device, incarnation=INCARNATION, nbytes=theirs.nbytes)
        self.transport = CudaIpcTransport(self.source, pool, theirs.pages)
        self.pool, self.theirs = pool, theirs
        ends = self.source.marks.ends
        self.stretches = {end: range(begin + 1, end + 1) for begin, end in zip((-1, *ends), ends, strict=False)}
        self.tickets = 0
        self.last_done = 0.0
        self._left = 0
        self._ended = threading.Condition()

    def push(self, end: int, src: tuple[int, ...], dst: tuple[int, ...]) -> None:
        """Starts the copies of this ticket in the stretch of layers that ends with `end`."""
        with self._ended:
            self._left += 1
        copies = [Copy(layer, 1, self.tickets, layer, 0, src, dst) for layer in self.stretches[end]]
        self.transport.start_layers(copies, self._done)

    def _done(self, digests: bytes) -> None:
        with self._ended:
            self.last_done = time.perf_counter()
            self._left -= 1
            self._ended.notify_all()

    def settle(self) -> None:
        """Waits until nothing is under way."""
        with self._ended:
            self._ended.wait_for(lambda: not self._left, 30)

    def close(self) -> None:
        """Lets go of the pool."""
        self.transport.close()
        self.source.close()


def in_pieces(count: int, pieces: int) -> tuple[int, ...]:
    """`count` pages from 1 on as so many stretches of neighbours, the last of them first."""
    stretches = torch.arange(1, count + 1).tensor_split(pieces)
    return tuple(torch.cat(stretches[::-1]).tolist())


class Run:
    """What is measured, and where it is written."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.recorder = Recorder("gpu", args.json)
        self.table = Table(title=f"KV pushed to {args.peer}", title_justify="left")
        for column in ("what", "median", "p99", "unit", "goal"):
            self.table.add_column(column, justify="right")

    def add(self, what: str, values: list[float], unit: str, goal: str = "", **point: object) -> None:
        """A line of the table and of the file."""
        ordered = sorted(values)
        median, p99 = percentile(ordered, 50), percentile(ordered, 99)
        where = place(self.args.device, self.args.peer)
        names = {"model": model_name(self.args), "mode": what, "place": where, **point}
        told = {"goal": goal} if goal else {}
        self.recorder.add("kv_push", median, unit, p99=round(p99, 3), **names, **told)  # type: ignore[arg-type]
        label = ", ".join([what, *(f"{key} {value}" for key, value in point.items())])
        self.table.add_row(label, f"{median:.2f}", f"{p99:.2f}", unit, goal)

    def speed(self, pusher: Pusher, context: int) -> None:
        """GB/s of one layer and of the first stretch of layers, their pages in any order, and in a row."""
        source, count = pusher.source, context // self.args.page_size
        generator = torch.Generator().manual_seed(1)
        target = LayersAt(pusher.pool.address, pusher.theirs.pages)
        for layers, name in itertools.product((1, source.marks.ends[0] + 1), ("scattered", "in a row")):
            values = []
            for _ in range(self.args.repeats):
                src = torch.randperm(source.pages - 1, generator=generator)[:count].add(1)
                dst = torch.randperm(pusher.theirs.pages - 1, generator=generator)[:count].add(1)
                if name == "in a row":
                    src = dst = torch.arange(1, count + 1)
                batch = PageBatch(src.tolist(), dst.tolist(), source.page_bytes)
                values.append(source.measure(batch, layers, target))
            point = {"layers": layers} if layers > 1 else {}
            self.add("speed", values, "GB/s", GOALS["speed"], context=context, pages=name, **point)

    def host(self, pusher: Pusher, context: int) -> None:
        """Microseconds that starting copies takes, all of it, over the layers of a prompt."""
        count = context // self.args.page_size
        for pieces in sorted({1, count, *(pieces for pieces in self.args.pieces if 1 < pieces < count)}):
            name = {1: "in a row", count: "scattered"}.get(pieces, f"in {pieces} pieces")
            took: list[float] = []
            for repeat in range(self.args.repeats + 3):
                pusher.tickets += 1
                pages = in_pieces(count, pieces)
                begun = time.perf_counter()
                for end in pusher.stretches:
                    pusher.source.written(end)
                    pusher.push(end, pages, pages)
                if repeat >= 3:
                    took.append((time.perf_counter() - begun) * 1e6 / pusher.source.layers)
                pusher.settle()
            self.add("host, a layer", took, "us", GOALS["host"], context=context, pages=name)

    def prefill(self, bench: Bench, pusher: Pusher, contexts: list[int]) -> None:
        """What pushing costs a prompt, and what is left of it when the prompt is done."""
        speed = self._layer_seconds(pusher)
        for context in contexts:
            times: dict[str, list[float]] = {mode: [] for mode in MODES}
            exposed: list[float] = []
            for repeat in range(self.args.repeats + 2):
                for mode in MODES:
                    took, late = self._prompt(bench, pusher, context, mode)
                    if repeat >= 2:
                        times[mode].append(took)
                        if mode == "push":
                            exposed.append(late)
            self._told(context, times, exposed, speed * context * pusher.source.layers)

    def _told(self, context: int, times: dict[str, list[float]], exposed: list[float], transfer: float) -> None:
        whole = statistics.median(times["none"])
        self.add("prompt, not pushed", [t * 1e3 for t in times["none"]], "ms", context=context)
        self.add("prompt, pushed", [t * 1e3 for t in times["push"]], "ms", context=context)
        lost = [100 * (t / whole - 1) for t in times["push"]]
        self.add("prefill lost to pushing", lost, "%", GOALS["lost"], context=context)
        plain = statistics.median(times["no digests"])
        digests = [100 * (t - plain) / whole for t in times["push"]]
        self.add("of it by digests", digests, "%", GOALS["digests"], context=context)
        events = [100 * (t / whole - 1) for t in times["events only"]]
        self.add("of it by events", events, "%", context=context)
        self.add("last copy seen after token 0", [e * 1e3 for e in exposed], "ms", context=context)
        hidden = [100 * (1 - max(e, 0.0) / transfer) for e in exposed]
        self.add("share hidden", hidden, "%", GOALS["hidden"], context=context)

    def _prompt(self, bench: Bench, pusher: Pusher, context: int, mode: str) -> tuple[float, float]:
        """Seconds until token 0, and from there until the last copy was seen completed."""
        pusher.tickets += 1
        hook = None if mode == "none" else _hook(pusher, mode, self.args.page_size)
        (prompt,) = bench.prompts(1, context)
        key = SequenceKey(2, pusher.tickets, 0, 0)
        begun = time.perf_counter()
        bench.core.add(Request(key, prompt, SamplingParams(temperature=0.0, max_tokens=2), Work.PREFILL))
        token = False
        while not token:
            result = bench.core.step(hook)
            for _, error in result.failures:
                raise error
            token = any(output.tokens for output in result.outputs)
        seen = time.perf_counter()
        pusher.settle()
        bench.core.release(key)
        return seen - begun, pusher.last_done - seen

    def _layer_seconds(self, pusher: Pusher) -> float:
        """Of one token of one layer."""
        return pusher.source.page_bytes / self.args.page_size / (pusher.transport.probe() * 1e9)


def _hook(pusher: Pusher, mode: str, page_size: int) -> LayerHook:
    """Pushes what became whole, as `PrefillHandover` does."""
    sent: dict[int, int] = {}

    def hook(layer: int, progress: list[ChunkProgress]) -> None:
        if layer not in pusher.stretches:
            return
        pusher.source.written(layer)
        if mode == "events only":
            return
        (chunk,) = progress
        whole = -(-chunk.ready // page_size) if chunk.ready == chunk.total else chunk.ready // page_size
        begin = sent.get(layer, 0)
        sent[layer] = whole
        pages = tuple(chunk.pages[begin:whole])
        pusher.push(layer, pages, tuple(range(begin + 1, whole + 1)))

    if mode != "no digests":
        return hook

    def without(layer: int, progress: list[ChunkProgress]) -> None:
        with _no_digests():
            hook(layer, progress)

    return without


@contextlib.contextmanager
def _no_digests() -> Iterator[None]:
    from twostroke.kvtransfer import cuda_source

    kept: Callable[..., None] = cuda_source.digest_pages
    cuda_source.digest_pages = lambda *_, **__: None  # type: ignore[assignment]
    try:
        yield
    finally:
        cuda_source.digest_pages = kept


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_engine_arguments(parser)
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS], help="all, by default")
    second = "cuda:1" if torch.cuda.device_count() > 1 else "cuda:0"
    parser.add_argument("--peer", default=second, help="the GPU of the pool that is pushed into")
    parser.add_argument("--context", type=int, nargs="*", default=[1024, 4096, 8192, 16384], help="prompts' tokens")
    parser.add_argument("--layer", type=int, default=8192, help="tokens of the layer whose speed is measured")
    parser.add_argument(
        "--pieces", type=int, nargs="*", default=[13, 22], help="stretches of neighbours that a prompt's pages are"
    )
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--own", type=int, default=0, help=argparse.SUPPRESS)
    parser.set_defaults(device="cuda:0")
    return parser.parse_args()


def main() -> None:
    """All parts on one engine."""
    args = arguments()
    if args.own:
        own(args.peer, args.own)
        return
    parts = args.parts or PARTS
    torch.cuda.set_device(args.device)
    run = Run(args)
    longest = max([*args.context, args.layer])
    pages = pages_for(2, longest, args.page_size)
    with contextlib.ExitStack() as stack:
        bench = stack.enter_context(built(args, sequences=8, pages=pages, token_budget=8448))
        config: ModelConfig = bench.engine.config
        mine = pool_bytes(bench.engine.pool)
        theirs = Shape(config.layers, mine.shape[1], mine.shape[2])
        descriptor = stack.enter_context(owner(args.peer, theirs))
        pusher = Pusher(mine, descriptor, theirs)
        stack.callback(pusher.close)
        run.add("probe", [pusher.transport.probe()], "GB/s")
        if "speed" in parts:
            run.speed(pusher, args.layer)
        if "host" in parts:
            run.host(pusher, args.layer)
        if "prefill" in parts:
            run.prefill(bench, pusher, args.context)
    Console(width=110).print(run.table)


if __name__ == "__main__":
    main()
