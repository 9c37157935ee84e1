"""The engine and the whole stack on the CPU, beside transformers on the same weights, dtype and threads, in one run.

`make bench-cpu`, or `python benchmarks/cpu.py [--quick]`. Runs of the two are interleaved, medians are told.
"""

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import stack
import torch
import transformers
from record import Recorder
from rich.console import Console
from rich.progress import track
from rich.table import Table

from twostroke.engine.build import Engine, build_engine
from twostroke.engine.config import DType, EngineOptions
from twostroke.engine.models import fingerprint, resolve
from twostroke.engine.request import Request, SamplingParams, SequenceKey
from twostroke.engine.tokenizer import Tokenizer

MODEL = "smollm2-135m"
PEER = f"transformers {transformers.__version__}"
OUTPUT = 128


def prompts(tokenizer: Tokenizer, count: int) -> list[list[int]]:
    """`count` distinct prompts of equal length (32 tokens), so that a static batch needs no padding."""
    text = (
        "In the year {year} a traveller set out from a small town by the sea, and wrote down what she saw on the way:"
    )
    ids = [
        tokenizer.encode(text.format(year=1500 + 7 * i) + " the harbour, the hills, the rivers and the old roads.")
        for i in range(count)
    ]
    return [prompt[:32] for prompt in ids]


class Ours:
    """The bare engine."""

    def __init__(self, path: Path, dtype: DType, threads: int) -> None:
        """Builds it; the page pool takes 1 GiB."""
        options = EngineOptions(dtype=dtype, threads=threads, prefix_cache=False)
        self.engine: Engine = build_engine(path, options, fingerprint=fingerprint(path))
        self._next = 0

    def run(self, batch: list[list[int]], tokens: int) -> float:
        """Seconds for all of `batch` to get `tokens` greedy tokens."""
        core, start = self.engine.core, time.perf_counter()
        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        for prompt in batch:
            self._next += 1
            core.add(Request(SequenceKey(1, self._next, 0, 0), prompt, params, arrival=time.monotonic()))
        while core.has_work():
            core.step()
        return time.perf_counter() - start


class Peer:
    """transformers' `generate` with its default cache."""

    def __init__(self, path: Path, dtype: DType) -> None:
        """Loads the same weights."""
        self._model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype)).eval()

    def run(self, batch: list[list[int]], tokens: int) -> float:
        """Seconds for a static batch."""
        ids = torch.tensor(batch)  # [batch, 32]
        start = time.perf_counter()
        with torch.inference_mode():
            self._model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, min_new_tokens=tokens,
                do_sample=False, pad_token_id=2,
            )  # fmt: skip
        return time.perf_counter() - start


def decode_rate(run: Callable[[list[list[int]], int], float], batch: list[list[int]]) -> float:
    """Tokens a second of one stream, the prompt's time taken out."""
    return (OUTPUT - 1) / (run(batch[:1], OUTPUT) - run(batch[:1], 1))


def total_rate(run: Callable[[list[list[int]], int], float], batch: list[list[int]]) -> float:
    """Tokens a second of the whole batch, prompts counted in the time."""
    return len(batch) * OUTPUT / run(batch, OUTPUT)


def engine_against_peer(recorder: Recorder, table: Table, path: Path, dtype: DType, rounds: int) -> None:
    """One stream and sixteen."""
    threads = psutil.cpu_count(logical=False) or 1
    torch.set_num_threads(threads)
    batch = prompts(Tokenizer.from_dir(path), 16)
    ours, peer = Ours(path, dtype, threads), Peer(path, dtype)
    gc.collect()
    gc.freeze()  # as a worker does; both gain
    for mode, rate, size, goal in (
        ("one stream, decode", decode_rate, 1, 1.8),
        ("16 streams, total", total_rate, 16, 1.2),
    ):
        pairs = []
        for _ in track(range(rounds + 1), description=f"{dtype}, {mode}", transient=True):
            pairs.append((rate(ours.run, batch[:size]), rate(peer.run, batch[:size])))
        mine, theirs = (statistics.median(pair[i] for pair in pairs[1:]) for i in (0, 1))
        recorder.add(
            "cpu", mine, "tokens/s", mode=mode, dtype=dtype, batch=size, threads=threads, goal=f">= {goal} x peer"
        )
        recorder.add("cpu", theirs, "tokens/s", mode=mode, dtype=dtype, batch=size, threads=threads, peer=PEER)
        table.add_row(
            f"{dtype}, {mode}", f"{mine:.1f} tokens/s", f"{theirs:.1f} tokens/s", f"{mine / theirs:.2f}x", f"{goal}x"
        )


def stack_against_engine(recorder: Recorder, table: Table, path: Path, rounds: int) -> None:
    """`gap01` through separate processes beside the bare engine's step, and what idle processes cost."""
    torch.set_num_threads(1)
    bare, batch = Ours(path, "bfloat16", 1), prompts(Tokenizer.from_dir(path), rounds)
    bare.run(batch[:1], 8)
    step = statistics.median((bare.run([prompt], 33) - bare.run([prompt], 1)) / 32 for prompt in batch[:8]) * 1e3
    with stack.running(MODEL) as running:
        finishes = [
            running.generate(prompt, max_tokens=8) for prompt in track(batch, description="gap01", transient=True)
        ]
        gaps = sorted(finish.timings.gap01_us / 1e3 for finish in finishes[2:])
        firsts = sorted(finish.timings.first_token_us / 1e3 for finish in finishes[2:])
        idle = running.idle_share(seconds=10)
    gap, p99 = statistics.median(gaps), gaps[min(len(gaps) - 1, int(len(gaps) * 0.99))]
    recorder.add("cpu", step, "ms", mode="bare engine step", dtype="bfloat16", batch=1, threads=1)
    recorder.add(
        "cpu",
        gap,
        "ms",
        p99=round(p99, 3),
        mode="gap01, 1P1D stack",
        dtype="bfloat16",
        batch=1,
        threads=1,
        goal="<= step + 10",
    )
    recorder.add("cpu", statistics.median(firsts), "ms", mode="TTFT, 1P1D stack", dtype="bfloat16", batch=1, threads=1)
    table.add_row(
        "gap01 through the stack",
        f"{gap:.1f} ms (p99 {p99:.1f})",
        f"step {step:.1f} ms",
        f"+{gap - step:.1f} ms",
        "+10 ms",
    )
    table.add_row("time to first token", f"{statistics.median(firsts):.1f} ms", "", "", "")
    for name, share in idle.items():
        recorder.add("cpu", share * 100, "% of a core", mode=f"idle, {name}", goal="< 1")
        table.add_row(f"idle, {name}", f"{share:.2%} of a core", "", "", "1%")


def main() -> None:
    """Measures, prints a table, appends to results/cpu.jsonl."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds, for a look")
    rounds = 2 if parser.parse_args().quick else 5
    path, recorder = resolve(MODEL), Recorder("cpu")
    table = Table("what", "twostroke", "beside it", "ratio or difference", "goal", title=f"CPU, {MODEL}")
    stack_against_engine(recorder, table, path, 8 * rounds)
    engine_against_peer(recorder, table, path, "bfloat16", rounds)
    engine_against_peer(recorder, table, path, "float32", max(1, rounds - 3))
    Console().print(table)


if __name__ == "__main__":
    main()
