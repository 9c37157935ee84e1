"""Decoding sequences beside long prompts that arrive at a fixed rate, in one engine; the token budget is swept.

`python benchmarks/gpu_mixed.py`. Small budgets keep the gaps between tokens short, large ones compute prompts faster:
this shows what each costs. Definitions: docs/benchmarking.md. The picture: benchmarks/plot_mixed.py.
"""

import argparse
import time
from collections import deque
from dataclasses import dataclass

from bench_engine import Bench, Stream, add_engine_arguments, built, model_name, pages_for
from record import Recorder
from rich.console import Console
from rich.table import Table

from twostroke.services.load.statistics import Sample

BUDGETS = (512, 1024, 2048, 4096, 8192)
SETTLE_S = 0.5  # of decoding alone, before the prompts
LATE = 3  # the prompts' run is given up after so many times its length: it is overloaded


@dataclass(frozen=True, slots=True)
class Load:
    """What the engine is given."""

    decoding: int  # sequences
    context: int  # tokens of their prompts
    tokens: int  # that each of them may decode
    prompt: int  # tokens of a prompt that arrives
    output: int  # tokens that it gets
    rate: float  # prompts a second
    seconds: float

    @property
    def arrivals(self) -> int:
        """Prompts in all."""
        return max(1, round(self.rate * self.seconds))


@dataclass(slots=True)
class Outcome:
    """Seconds; of one token budget."""

    quiet: Sample  # gaps between tokens while no prompt is there
    itl: Sample  # of the decoding sequences, while there are prompts
    ttft: Sample  # of the prompts, from when they were due
    busy: float  # during which a prompt was there that had no token yet
    prompt_tokens: int  # computed in that time
    steps: int
    whole: bool  # False: overloaded, given up

    @property
    def prefill_rate(self) -> float:
        """Prompt tokens a second."""
        return self.prompt_tokens / self.busy if self.busy else 0.0


def set_budget(bench: Bench, budget: int) -> None:
    """Another token budget for the same engine: building one for each would take longer than the runs."""
    scheduler = bench.core._scheduler
    if not hasattr(scheduler, "_token_budget"):
        raise RuntimeError("the scheduler keeps its budget elsewhere now")
    scheduler._token_budget = budget


def run(bench: Bench, load: Load, budget: int) -> Outcome:
    """One budget, on an idle engine; leaves it idle."""
    set_budget(bench, budget)
    bench.streams.clear()
    keys = [bench.add(prompt, load.tokens) for prompt in bench.prompts(load.decoding, load.context)]
    decoding = [bench.streams[key] for key in keys]
    prompts = deque(bench.prompts(load.arrivals, load.prompt))
    while any(not stream.times for stream in decoding):
        bench.step()
    settled = time.perf_counter()
    while time.perf_counter() < settled + SETTLE_S:
        bench.step()
    begin = time.perf_counter()
    arrived: list[Stream] = []
    due: list[float] = []
    steps = 0
    while prompts or not all(stream.done for stream in arrived):
        now = time.perf_counter()
        if now > begin + LATE * load.seconds:
            break
        while prompts and begin + len(due) / load.rate <= now:
            due.append(begin + len(due) / load.rate)
            keys.append(bench.add(prompts.popleft(), load.output))
            arrived.append(bench.streams[keys[-1]])
        if bench.core.has_work():
            bench.step()
            steps += 1
        else:  # the decoding ones are all done
            time.sleep(max(0.0, begin + len(due) / load.rate - time.perf_counter()))
    whole = not prompts and all(stream.done for stream in arrived)
    bench.cancel(keys)
    return _outcome(load, decoding, arrived, due, (settled, begin), steps, whole)


def _outcome(
    load: Load,
    decoding: list[Stream],
    arrived: list[Stream],
    due: list[float],
    times: tuple[float, float],
    steps: int,
    whole: bool,
) -> Outcome:
    """`times`: when all decoded, and when the first prompt came."""
    settled, begin = times
    answered = [(early, stream.times[0]) for early, stream in zip(due, arrived, strict=True) if stream.times]
    end = max((first for _, first in answered), default=begin)
    quiet, itl, ttft = Sample(), Sample(), Sample()
    for stream in decoding:
        for when, gap in stream.gaps:
            if settled < when <= begin:
                quiet.add(gap)
            elif begin < when <= end:
                itl.add(gap)
    for early, first in answered:
        ttft.add(first - early)
    return Outcome(quiet, itl, ttft, _covered(answered), len(answered) * load.prompt, steps, whole)


def _covered(spans: list[tuple[float, float]]) -> float:
    """Length of the union of intervals."""
    covered, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        covered += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return covered


def ms(sample: Sample, percent: float) -> float:
    """Milliseconds; NaN without values."""
    value = sample.percentile(percent)
    return float("nan") if value is None else round(value * 1e3, 3)


def record(recorder: Recorder, args: argparse.Namespace, load: Load, budget: int, outcome: Outcome) -> None:
    """The line of one budget: the value is the median gap between tokens."""
    figures = {
        "quiet_itl_p50": ms(outcome.quiet, 50),
        "quiet_itl_p99": ms(outcome.quiet, 99),
        "itl_max": ms(outcome.itl, 100),
        "ttft_p50": ms(outcome.ttft, 50),
        "ttft_p99": ms(outcome.ttft, 99),
        "prefill_tokens_s": round(outcome.prefill_rate),
        "steps": outcome.steps,
        "whole": outcome.whole,
    }
    recorder.add(
        "mixed", ms(outcome.itl, 50), "ms", p99=ms(outcome.itl, 99), model=model_name(args), dtype=args.dtype,
        mode="both", token_budget=budget, decoding=load.decoding, context=load.context, prompt=load.prompt,
        rate=load.rate, figures=figures,
    )  # fmt: skip


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_engine_arguments(parser)
    parser.add_argument("--budgets", type=int, nargs="+", default=list(BUDGETS), help="tokens a step")
    parser.add_argument("--decoding", type=int, default=48, help="sequences that decode all the time")
    parser.add_argument("--context", type=int, default=1024, help="tokens of their prompts")
    parser.add_argument("--tokens", type=int, default=4096, help="tokens that each of them decodes at most")
    parser.add_argument("--prompt", type=int, default=8192, help="tokens of a prompt that arrives")
    parser.add_argument("--output", type=int, default=32, help="tokens that it gets")
    parser.add_argument("--rate", type=float, default=2.0, help="prompts a second")
    parser.add_argument("--seconds", type=float, default=10.0, help="of arrivals, for each budget")
    return parser.parse_args()


def main() -> None:
    """Measures, prints a table, appends to results/gpu.jsonl."""
    args = parse()
    load = Load(args.decoding, args.context, args.tokens, args.prompt, args.output, args.rate, args.seconds)
    pages = pages_for(load.decoding, load.context + load.tokens, args.page_size)
    pages += pages_for(load.arrivals, load.prompt + load.output, args.page_size)
    recorder = Recorder("gpu", args.json)
    title = f"{load.decoding} decoding, {load.rate:g} prompts/s of {load.prompt}, {model_name(args)}, {args.dtype}; ms"
    table = Table(title=title, title_justify="left")
    columns = ("budget", "ITL p50", "p99", "max", "alone p50", "TTFT p50", "p99", "prefill tok/s", "")
    for column in columns:
        table.add_column(column, justify="right")
    with built(
        args, sequences=load.decoding + load.arrivals, pages=pages, token_budget=max(args.budgets)
    ) as bench:  # fmt: skip
        bench.run(bench.prompts(2, load.prompt), 4)
        for budget in args.budgets:
            outcome = run(bench, load, budget)
            record(recorder, args, load, budget, outcome)
            shown = [ms(outcome.itl, 50), ms(outcome.itl, 99), ms(outcome.itl, 100), ms(outcome.quiet, 50)]
            shown += [ms(outcome.ttft, 50), ms(outcome.ttft, 99)]
            table.add_row(
                str(budget),
                *(f"{value:.1f}" for value in shown),
                f"{outcome.prefill_rate:,.0f}",
                "" if outcome.whole else "overloaded",
            )
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
