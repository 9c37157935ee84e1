"""The sampler on one GPU at a vocabulary of 128,256: checked, then timed as CUDA graphs beside torch.

`python benchmarks/gpu_sampler.py [--tune] [--rows 1 32 256] [--json FILE]`: half a minute; tuning, which compiles,
about two. Two kinds of logits: `peaked` as a language model's are (frequent tokens have low ids; top-p 0.9 keeps tens
of tokens), `flat` as those of random weights, where it keeps most of the vocabulary.
"""

import argparse
import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from record import Recorder
from torch import Tensor

from twostroke.engine.request import SamplingParams
from twostroke.engine.sampler import Draw, sample
from twostroke.kernels.gpu import blocks, cut
from twostroke.kernels.gpu import draw as drawing
from twostroke.kernels.gpu.draw import DrawParams, DrawScratch, draw, draw_greedy
from twostroke.kernels.gpu.logprobs import logprobs

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # a CPU is for a look at the script
DTYPE = torch.bfloat16
VOCAB = 128_256 if DEVICE.type == "cuda" else 1000
TOP = 5
MODES: dict[str, list[SamplingParams]] = {  # rows take them in turn
    "greedy rows": [SamplingParams(temperature=0.0)],
    "temperature": [SamplingParams(temperature=0.8)],
    "top-k 50": [SamplingParams(temperature=0.8, top_k=50)],
    "top-p 0.9": [SamplingParams(temperature=0.8, top_p=0.9)],
    "min-p 0.05": [SamplingParams(temperature=0.8, min_p=0.05)],
}
MODES["mixed"] = [params for own in MODES.values() for params in own]
TUNED = {  # module: constants tried, in all combinations
    blocks: {"TILE": (8, 16, 32), "WARPS": (2, 4, 8)},
    cut: {"TILE": (16, 32), "UNROLL": (4, 8), "WARPS": (8, 16, 32)},
    drawing: {"WARPS": (1, 2, 4, 8)},
}


@dataclass(frozen=True)
class Case:
    """Something to be timed."""

    name: str
    kind: str  # of logits
    rows: int
    launch: Callable[[], object]
    peer: str | None = None


def logits_like(kind: str, rows: int) -> Tensor:
    """[rows, VOCAB]."""
    noise = torch.randn(rows, VOCAB, device=DEVICE)
    if kind == "flat":
        return noise.to(DTYPE)
    frequent = torch.log1p(torch.arange(VOCAB, device=DEVICE) / 50.0)
    return (2.2 * noise - 1.1 * frequent + 8.0).to(DTYPE)


def draws_of(mode: str, rows: int) -> list[Draw]:
    """Parameters of each row."""
    own = MODES[mode]
    return [Draw(own[i % len(own)], 0, 100 + i) for i in range(rows)]


def params_of(draws: list[Draw]) -> DrawParams:
    """The same on the device."""

    def column(values: list[float] | list[int], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=DEVICE)

    own = [each.params for each in draws]
    return DrawParams(
        temperature=column([p.temperature for p in own], torch.float32),
        top_k=column([p.top_k for p in own], torch.int32),
        top_p=column([p.top_p for p in own], torch.float64),
        min_p=column([p.min_p for p in own], torch.float64),
        seed=column(list(range(len(own))), torch.int64),
        sample=column([each.sample for each in draws], torch.int32),
        position=column([each.position for each in draws], torch.int32),
    )


def by_sorting(logits: Tensor, temperature: float, top_p: float) -> Tensor:
    """Top-p as it is usually written; the draw by an exponential race, which is what torch.multinomial does."""
    values, ids = (logits.float() / temperature).sort(dim=1, descending=True)
    shares = values.softmax(dim=1)
    shares = shares.masked_fill(shares.cumsum(dim=1) - shares >= top_p, 0.0)
    winner = (shares / torch.empty_like(shares).exponential_()).argmax(dim=1, keepdim=True)
    return ids.gather(1, winner)


def cases(rows: int) -> list[Case]:
    """All of a number of rows."""
    scratch = DrawScratch(rows, VOCAB, DEVICE)
    out = torch.empty(rows, dtype=torch.int64, device=DEVICE)
    values, ids = (
        torch.empty(rows, 1 + TOP, device=DEVICE),
        torch.empty(rows, 1 + TOP, dtype=torch.int64, device=DEVICE),
    )
    found = []
    for kind in ("peaked", "flat"):
        logits = logits_like(kind, rows)

        def run(name: str, launch: Callable[[], object], kind: str = kind, peer: str | None = None) -> None:
            found.append(Case(name, kind, rows, launch, peer))

        for mode in MODES if kind == "peaked" else ("top-k 50", "top-p 0.9", "min-p 0.05"):
            params = params_of(draws_of(mode, rows))
            run(mode, lambda logits=logits, params=params: draw(logits, params, out, scratch))
        if kind == "peaked":
            run("greedy", lambda logits=logits: draw_greedy(logits, out, scratch))
            run("logprobs", lambda logits=logits: logprobs(logits, out, TOP, values, ids, scratch))
            run("greedy", lambda logits=logits: logits.argmax(dim=1), peer="torch.argmax")
            run("top-p 0.9", lambda logits=logits: by_sorting(logits, 0.8, 0.9), peer="torch sort")
    return found


def check() -> None:
    """The plain sampler's tokens for the same logits. Raises AssertionError."""
    rows = 40
    scratch, out = DrawScratch(rows, VOCAB, DEVICE), torch.empty(rows, dtype=torch.int64, device=DEVICE)
    for kind in ("peaked", "flat"):
        logits, draws = logits_like(kind, rows), draws_of("mixed", rows)
        params = params_of(draws)
        params.seed.zero_()  # that of `draws`
        draw(logits, params, out, scratch)
        expected = torch.tensor([token.token_id for token in sample(logits, draws)], device=DEVICE)
        assert int((out != expected).sum()) <= 1, (kind, out, expected)  # one near tie
        draw_greedy(logits, out, scratch)
        assert torch.equal(logits.gather(1, out[:, None])[:, 0], logits.amax(dim=1))


def seconds(case: Case) -> float:
    """Of one launch: the median of 7 replays of a graph of many."""
    case.launch()
    if DEVICE.type != "cuda":
        start = time.perf_counter()
        case.launch()
        return time.perf_counter() - start
    launches = 2 if case.peer == "torch sort" else 20
    torch.cuda.synchronize()
    graph, times = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        for _ in range(launches):
            case.launch()
    graph.replay()
    for _ in range(7):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3 / launches)
    return statistics.median(times)


def tune(rows: list[int]) -> None:
    """Prints the times of the launch constants' combinations."""
    for module, constants in TUNED.items():
        kept = {name: getattr(module, name) for name in constants}
        names = {blocks: ("greedy", "temperature"), cut: ("top-k 50", "top-p 0.9"), drawing: ("temperature",)}[module]
        tried = [case for count in rows for case in cases(count) if case.name in names and not case.peer]
        for values in itertools.product(*constants.values()):
            for name, value in zip(constants, values, strict=True):
                setattr(module, name, value)
            figures = (f"{case.rows} {case.name} {case.kind} {seconds(case) * 1e6:.1f}" for case in tried)
            print(module.__name__.split(".")[-1], dict(zip(constants, values, strict=True)), "us:", ", ".join(figures))
        for name, value in kept.items():
            setattr(module, name, value)


def main() -> None:
    """Checks, measures, prints a table, records."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--tune", action="store_true", help="try the kernels' launch constants instead")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append records here, not to results/gpu.jsonl")
    args = parser.parse_args()
    torch.manual_seed(0)
    check()
    if args.tune:
        return tune(args.rows)
    recorder = Recorder("gpu", args.json)
    for case in itertools.chain.from_iterable(map(cases, args.rows)):
        taken = seconds(case)
        speed = case.rows * VOCAB * DTYPE.itemsize / taken / 1e9  # of the logits read once
        who = case.peer or "twostroke"
        print(f"{case.rows:4d} rows  {case.name:12s} {case.kind:7s} {who:13s} {taken * 1e6:9.1f} us {speed:8.0f} GB/s")
        point = {"mode": case.name, "logits": case.kind, "batch": case.rows, "vocab": VOCAB, "dtype": "bfloat16"}
        recorder.add("sampler", taken * 1e6, "us", peer=case.peer, gb_per_s=round(speed, 1), **point)


if __name__ == "__main__":
    main()
