"""The way of a hand-over, station by station: from the end of a prompt to the launch of its first decode step.

`python benchmarks/gpu_handover.py`: a prefill and a decode worker on two GPUs (--devices), one request at a time. Bench
`pd_handover`; the stations are those of timed_worker.py. Definitions: docs/benchmarking.md.
"""

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO

import pd_stack
from bench_engine import CONFIG, model_name
from gpu_pd import Figures
from record import Recorder, place
from rich.console import Console
from rich.table import Table
from timed_worker import STATIONS

from twostroke.services.client.client import Client
from twostroke.services.load.bench import limits_of
from twostroke.services.load.lengths import Uniform
from twostroke.services.load.plan import LoadPlan, LoadSpec
from twostroke.services.load.record import Record
from twostroke.services.load.run import LoadRun, Options
from twostroke.services.load.statistics import percentile

GOAL = "<= 1"  # ms, from the first station to the launch
OUTPUT = 4  # tokens
SETTLE = 2  # requests of each length that are not counted
WRITTEN_S = 1.5  # the workers write what they saw twice a second


def ways(lines: Iterable[str]) -> list[dict[str, float]]:
    """Milliseconds from the first station to each, of every request that was seen at all of them, in order of time."""
    seen: dict[str, dict[str, float]] = {}
    for line in lines:
        told = json.loads(line)
        seen.setdefault(told["request"], {}).setdefault(told["station"], told["at"])
    whole = sorted((way for way in seen.values() if way.keys() >= set(STATIONS)), key=lambda way: way[STATIONS[0]])
    return [{station: 1e3 * (way[station] - way[STATIONS[0]]) for station in STATIONS} for way in whole]


async def requests(client: Client, context: int, count: int, seed: int) -> None:
    """One after another; RuntimeError where one fails."""
    plan = LoadPlan(
        LoadSpec(Uniform(context, context), Uniform(OUTPUT, OUTPUT), seed=seed), limits_of(await client.model(""))
    )
    records: list[Record] = []
    await LoadRun(client, plan, Options(requests=count, timeout_s=120), records.append).closed(1)
    Figures(records)


def table(medians: Mapping[int, Mapping[str, float]]) -> Table:
    """A line a length."""
    out = Table(title="hand-over, ms from the end of the prompt (median)", title_justify="left")
    for column in ("prompt", *STATIONS[1:]):
        out.add_column(column, justify="right")
    for context, way in medians.items():
        out.add_row(str(context), *(f"{way[station]:.2f}" for station in STATIONS[1:]))
    return out


async def measure(args: argparse.Namespace, address: str, seen: IO[str]) -> dict[int, dict[str, float]]:
    """Each length in turn. `seen`: what the workers write."""
    recorder = Recorder("gpu", args.json)
    medians: dict[int, dict[str, float]] = {}
    async with Client(address) as client:
        for context in args.contexts:
            await requests(client, context, args.requests + SETTLE, args.seed + context)
            await asyncio.sleep(WRITTEN_S)
            found = ways(seen)[SETTLE:]
            if len(found) != args.requests:
                raise RuntimeError(f"{len(found)} of {args.requests} requests of {context} tokens went all the way")
            medians[context] = {station: statistics.median(way[station] for way in found) for station in STATIONS}
            launches = sorted(way["launch"] for way in found)
            figures = {station: round(value, 3) for station, value in medians[context].items()}
            recorder.add(
                "pd_handover", percentile(launches, 50), "ms", p99=round(percentile(launches, 99), 3), context=context,
                model=model_name(args), dtype=args.dtype, place=place(*args.devices), goal=GOAL, figures=figures,
            )  # fmt: skip
    return medians


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    pd_stack.add_arguments(parser, CONFIG)
    parser.add_argument("--requests", type=int, default=20, help="of a length")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of the prompts")
    return parser.parse_args()


def main() -> None:
    """All lengths."""
    args = arguments()
    with tempfile.TemporaryDirectory() as scratch:
        logs = args.logs or Path(scratch)
        logs.mkdir(parents=True, exist_ok=True)
        seen = logs / "times.jsonl"
        seen.write_text("")
        os.environ["TWOSTROKE_TIMES"] = str(seen.absolute())
        model = pd_stack.model_directory(args.config, Path(scratch))
        flags = ("--dtype", args.dtype, *args.worker)
        with seen.open() as file, pd_stack.running("timed", model, args.devices, logs, flags) as address:
            Console(width=120).print(table(asyncio.run(measure(args, address, file))))


if __name__ == "__main__":
    main()
