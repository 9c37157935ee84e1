"""The engine alone on one GPU: decode steps, prefill, idle time and host time, start-up; beside vLLM's figures.

`python benchmarks/gpu.py [start decode prefill idle]`; all, by default, on one engine. Definitions:
docs/benchmarking.md. On a CPU, for a look at the script: --device cpu --config DIR --decode 2x32 --prefill 1x64 ...
"""

import time

START = time.perf_counter()

import argparse  # noqa: E402
import itertools  # noqa: E402
import os  # noqa: E402
import statistics  # noqa: E402

# CUPTI, which the profiler uses, must not be taken down while CUDA graphs live.
os.environ |= {"TEARDOWN_CUPTI": "0", "DISABLE_CUPTI_LAZY_REINIT": "1"}

import torch  # noqa: E402
from bench_engine import Bench, add_engine_arguments, built, model_name, pages_for  # noqa: E402
from gpu_trace import MARK, StepWork, gaps_between, idle_within, read_trace, step_work  # noqa: E402
from host_time import HostTime  # noqa: E402
from record import Recorder  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402
from targets import DECODE, HOST_MS, IDLE_US, MODEL, PREFILL, Point, Target, record_peer  # noqa: E402

from twostroke.services.load.statistics import percentile  # noqa: E402

PARTS = ("start", "decode", "prefill", "idle")
STEPS = 128  # between the two runs whose difference a decode step is
WATCHED = 40  # steps under the profiler
LEFT_OUT = 3  # of them, while it starts
ENOUGH_S = 4.0  # a point that took so long is not measured again


def point(text: str) -> Point:
    """`256x1024`: sequences, tokens of each prompt."""
    batch, context = text.split("x")
    return int(batch), int(context)


class Run:
    """One engine, measured at every point."""

    def __init__(self, args: argparse.Namespace, bench: Bench) -> None:
        """`args`: of the command line."""
        self.args, self.bench = args, bench
        self.model = model_name(args)
        self.recorder = Recorder("gpu", args.json)
        self.console = Console(width=110)
        on_gpu = torch.cuda.is_available() and "H200" in torch.cuda.get_device_name()
        self.comparable = on_gpu and self.model == MODEL and args.dtype == "bfloat16"

    def record(self, bench: str, value: float, unit: str, **point: object) -> None:
        """A line of ours."""
        kinds = {"model": self.model, "dtype": self.args.dtype, "kv_dtype": self.args.dtype}
        self.recorder.add(bench, value, unit, **{**kinds, **point})  # type: ignore[arg-type]

    def table(self, title: str, *columns: str) -> Table:
        """Numbers to the right."""
        table = Table(title=f"{title}, {self.model}, {self.args.dtype}", title_justify="left")
        for column in columns:
            table.add_column(column, justify="right")
        return table

    def start(self, begun: float) -> None:
        """`begun`: seconds from the interpreter's start to the engine's."""
        self.bench.run(self.bench.prompts(1, 64), 4)  # what is made at first use
        first = self.bench.run(self.bench.prompts(1, 64), 1)
        parts = {"imports": begun, **engine_parts(self.bench), "engine, whole": self.bench.build_s}
        table = self.table("start", "part", "s")
        for name, seconds in parts.items():
            table.add_row(name, f"{seconds:.2f}")
            self.record("start", seconds, "s", mode=name)
        table.add_row("first token of 64, ready", f"{first:.3f}")
        self.console.print(table)

    def decode(self, points: list[Point]) -> None:
        """Milliseconds a step: (T(1 + 128 tokens) - T(1 token)) / 128."""
        table = self.table("decode, ms a step", "batch x context", "ours", "median step", "vLLM", "goal", "limit")
        for batch, context in points:
            value, typical, runs = decode_step(self.bench, batch, context, self.args.repeats, self.args.steps)
            target = DECODE.get((batch, context)) if self.comparable else None
            self.record(
                "decode_step", value, "ms", batch=batch, context=context,
                figures={"median_step": round(typical, 4), "runs": runs}, **goals(target, "<="),
            )  # fmt: skip
            if target:
                record_peer(self.recorder, "decode_step", target, "ms", (batch, context))
            table.add_row(f"{batch} x {context}", f"{value:.2f}", f"{typical:.2f}", *shown(target, value, "{:.2f}", 1))
        self.console.print(table)

    def prefill(self, points: list[Point]) -> None:
        """Tokens a second, whole call, one token out."""
        table = self.table("prefill, tokens/s", "prompts x tokens", "ours", "best", "vLLM", "goal", "limit")
        for batch, context in points:
            times = repeated(lambda b=batch, c=context: self.bench.run(self.bench.prompts(b, c), 1), self.args.repeats)
            value = batch * context / statistics.median(times)
            target = PREFILL.get((batch, context)) if self.comparable else None
            best = batch * context / min(times)
            self.record(
                "prefill", value, "tokens/s", batch=batch, context=context,
                figures={"best": round(best), "runs": len(times)}, **goals(target, ">="),
            )  # fmt: skip
            if target:
                record_peer(self.recorder, "prefill", target, "tokens/s", (batch, context))
            table.add_row(f"{batch} x {context}", f"{value:,.0f}", f"{best:,.0f}",
                          *shown(target, value, "{:,.0f}", -1))  # fmt: skip
        self.console.print(table)

    def idle(self, batch: int, context: int) -> None:
        """GPU idle between decode steps, and the host's time a step; the profiler is off for the latter."""
        bench = self.bench
        bench.streams.clear()
        tokens = watched_tokens(self.args)
        keys = [bench.add(prompt, tokens) for prompt in bench.prompts(batch, context)]
        while any(not stream.times for stream in bench.streams.values()):
            bench.step()
        host = HostTime(bench.engine)
        with host:
            for _ in range(WATCHED):
                with host.step():
                    result = bench.core.step()
                bench.note(result)
        steps = watched(bench) if torch.cuda.is_available() else []
        bench.cancel(keys)
        table = self.table(f"decode steps at {batch} x {context}", "what", "median", "p99", "goal")
        self.row(table, "host_step", "host, ms", [h * 1e3 for h in host.busy], f"<= {HOST_MS:g}", batch, context)
        self.row(table, "host_wait", "host waits, ms", [w * 1e3 for w in host.waited], "", batch, context)
        if len(steps) > LEFT_OUT + 1:
            steps = steps[LEFT_OUT:]
            self.row(table, "gpu_idle", "GPU idle between steps, us", gaps_between(steps), f"<= {IDLE_US:g}", batch,
                     context)  # fmt: skip
            self.row(table, "gpu_idle_within", "GPU idle within a step, us", idle_within(steps), "", batch, context)
            table.add_row("kernels a step", f"{statistics.median(step.kernels for step in steps):.0f}", "", "")
        self.console.print(table)

    def row(
        self, table: Table, bench: str, text: str, values: list[float], goal: str, batch: int, context: int
    ) -> None:
        """Records and shows a distribution; its unit ends `text`."""
        ordered = sorted(values)
        median, p99 = percentile(ordered, 50), percentile(ordered, 99)
        told = {"goal": goal} if goal else {}
        self.record(bench, median, text.rsplit(", ", 1)[1], p99=round(p99, 4), batch=batch, context=context, **told)
        table.add_row(text, f"{median:.3f}", f"{p99:.3f}", goal)


def engine_parts(bench: Bench) -> dict[str, float]:
    """Seconds of each part of the engine's start, where it tells."""
    times = getattr(bench.engine, "times", None)
    return {} if times is None else times.to_dict()


def repeated(measure, most: int) -> list[float]:  # type: ignore[no-untyped-def]
    """Up to `most` measurements; fewer where each takes long."""
    times: list[float] = []
    while len(times) < most and sum(times) < ENOUGH_S:
        times.append(measure())
    return times


def decode_step(bench: Bench, batch: int, context: int, most: int, steps: int) -> tuple[float, float, int]:
    """Milliseconds: by the definition, and of the median step in which all decoded; measurements taken."""
    values: list[float] = []
    whole: list[float] = []
    spent = 0.0
    while len(values) < most and spent < ENOUGH_S:
        one = bench.run(bench.prompts(batch, context), 1)
        many = bench.run(bench.prompts(batch, context), 1 + steps)
        spent += one + many
        values.append((many - one) / steps)
        whole += full_steps(bench)
    return statistics.median(values) * 1e3, statistics.median(whole) * 1e3, len(values)


def full_steps(bench: Bench) -> list[float]:
    """Seconds of each step from which every sequence had a token after its first."""
    firsts = max(stream.times[0] for stream in bench.streams.values())
    last = min(stream.times[-1] for stream in bench.streams.values())
    times = sorted({when for stream in bench.streams.values() for when in stream.times if firsts <= when <= last})
    return [after - before for before, after in itertools.pairwise(times)] or [float("nan")]


def watched(bench: Bench) -> list[StepWork]:
    """Decode steps under the profiler."""
    from torch.profiler import ProfilerActivity, profile, record_function

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        for _ in range(WATCHED):
            with record_function(MARK):
                bench.step()
        torch.cuda.synchronize()
    return step_work(read_trace(profiler))


def watched_tokens(args: argparse.Namespace) -> int:
    """Tokens of a sequence: enough for the first ones while the last prompts are computed, and then for all."""
    batch, context = args.idle
    prefill = batch * context // max(1, args.token_budget - batch)
    return int(prefill) + 2 * WATCHED + 32


def goals(target: Target | None, relation: str) -> dict[str, str]:
    """For a record."""
    return {} if target is None else {"goal": f"{relation} {target.goal:g}", "limit": f"{target.limit:g}"}


def shown(target: Target | None, value: float, form: str, sign: int) -> list[str]:
    """The peer's figure and the goal, green where ours is not behind; the limit. `sign`: 1 where less is good."""
    if target is None:
        return ["", "", ""]
    colours = ["green" if sign * value <= sign * bound else "red" for bound in (target.peer, target.goal)]
    bounds = [f"[{c}]{form.format(b)}[/]" for c, b in zip(colours, (target.peer, target.goal), strict=True)]
    return [*bounds, form.format(target.limit)]


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; default: all")
    add_engine_arguments(parser)
    parser.add_argument("--token-budget", type=int, default=8448)
    parser.add_argument("--decode", type=point, nargs="*", default=list(DECODE), metavar="BATCHxCONTEXT")
    parser.add_argument("--prefill", type=point, nargs="*", default=list(PREFILL), metavar="PROMPTSxTOKENS")
    parser.add_argument("--idle", type=point, default=(256, 1024), metavar="BATCHxCONTEXT")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    if unknown := set(args.parts) - set(PARTS):
        parser.error(f"no such part: {', '.join(unknown)}")
    args.parts = args.parts or list(PARTS)
    return args


def main() -> None:
    """Measures, prints tables, appends to results/gpu.jsonl."""
    args = parse()
    loads: list[tuple[Point, int]] = []
    loads += [(p, 1 + args.steps) for p in args.decode if "decode" in args.parts]
    loads += [(p, 1) for p in args.prefill if "prefill" in args.parts]
    loads += [(args.idle, watched_tokens(args))] if "idle" in args.parts else []
    loads += [((1, 64), 4)]
    pages = max(pages_for(batch, context + tokens, args.page_size) for (batch, context), tokens in loads)
    sequences = max(batch for (batch, _), _ in loads)
    begun = time.perf_counter() - START
    with built(args, sequences=sequences, pages=pages, token_budget=args.token_budget) as bench:
        run = Run(args, bench)
        run.start(begun)
        if "decode" in args.parts:
            run.decode(args.decode)
        if "prefill" in args.parts:
            run.prefill(args.prefill)
        if "idle" in args.parts:  # last: the profiler stays in the process
            run.idle(*args.idle)


if __name__ == "__main__":
    main()
