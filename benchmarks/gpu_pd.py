"""Prefill and decode on two GPUs, through the real gateway and processes: idle, under load, beside two replicas.

`python benchmarks/gpu_pd.py MODE [idle load]`, one call a mode: `colocated` (two workers of both roles),
`disaggregated` (one prefill, one decode worker), `null` (the same, transfers declared done). `check` compares the
tokens of one worker and of two. Benches `pd_idle` and `pd_load`; definitions: docs/benchmarking.md.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import pd_stack
from bench_engine import CONFIG, model_name
from record import Recorder
from rich.console import Console
from rich.table import Table

from twostroke.services.client.client import Client
from twostroke.services.load.bench import limits_of
from twostroke.services.load.lengths import Uniform
from twostroke.services.load.plan import LoadPlan, LoadSpec
from twostroke.services.load.record import OK, Record
from twostroke.services.load.run import LoadRun, Options
from twostroke.services.load.statistics import percentile

MODES = ("colocated", "disaggregated", "null")
PARTS = ("idle", "load")
IDLE_OUTPUT = 32  # tokens
SETTLE = 2  # requests of each kind that are not counted
PEER = "vLLM 0.26.0"
PEER_SOURCE = "two H200 on an earlier day, its NIXL connector; its first token is that of the decode worker"


class Load(NamedTuple):
    """A point."""

    rate: float  # requests a second
    context: int  # tokens of a prompt
    output: int  # tokens of an answer


LOADS = (Load(8, 2048, 128), Load(2, 8192, 256), Load(16, 2048, 128), Load(4, 8192, 256))
PEER_IDLE: Mapping[str, Mapping[int, float]] = {  # TTFT, ms
    "colocated": {1024: 31.6, 4096: 104, 8192: 222, 16384: 497},
    "disaggregated": {1024: 56.4, 4096: 156, 8192: 307, 16384: 662},
}
PEER_LOAD: Mapping[str, Mapping[Load, tuple[float, float]]] = {  # TTFT p50, ITL p99, ms
    "colocated": {LOADS[2]: (63, 40.2), LOADS[3]: (235, 180)},
    "disaggregated": {LOADS[2]: (143, 14.1), LOADS[3]: (734, 63)},
}


def fifo(arrivals: Sequence[float], services: Sequence[float]) -> list[float]:
    """Seconds from each arrival to its end of service, where one server takes `services[i]` for the i-th."""
    free, out = 0.0, []
    for arrival, service in zip(sorted(arrivals), services, strict=True):
        free = max(free, arrival) + service
        out.append(free - arrival)
    return out


def served(ends: Sequence[float], computed: Sequence[float]) -> list[float]:
    """Seconds that a server of one at a time had each, in the order of their `ends`. `computed`: from the launch of
    each to its end, which may have begun while the one before it was still being served.
    """
    before, out = 0.0, []
    for end, seconds in sorted(zip(ends, computed, strict=True)):
        out.append(min(seconds, end - before))
        before = end
    return out


def milliseconds(values: Sequence[float], percent: float) -> float:
    """A percentile of seconds."""
    return percentile(sorted(values), percent) * 1e3


class Figures:
    """What became of the requests of a point."""

    def __init__(self, records: Sequence[Record]) -> None:
        """RuntimeError where one failed: a point with failures is no point."""
        bad = [f"{record.status}: {record.message}" for record in records if record.status != OK]
        if bad or not records:
            raise RuntimeError(f"{len(bad)} of {len(records)} requests failed; the first: {bad[:1]}")
        self.records = records
        self.ttft = [record.ttft for record in records if record.ttft is not None]
        self.gap01 = [record.gap01 for record in records if record.gap01 is not None]
        self.itl = [gap for record in records for gap in record.gaps[1:]] or [0.0]
        timings = [record.finish.timings for record in records if record.finish is not None]
        self.prefill = [spent.prefill_us / 1e6 for spent in timings]
        self.queue = [spent.queue_us / 1e6 for spent in timings]
        self.transfer = [spent.transfer_us / 1e6 for spent in timings]

    def named(self) -> dict[str, float]:
        """For the result file, ms; the value itself is the median time to the first token."""
        figures = {
            "ttft_p99": milliseconds(self.ttft, 99),
            "itl_p50": milliseconds(self.itl, 50),
            "itl_p99": milliseconds(self.itl, 99),
            "gap01_p50": milliseconds(self.gap01, 50),
            "gap01_p99": milliseconds(self.gap01, 99),
            "prefill_p50": milliseconds(self.prefill, 50),
            "queue_p50": milliseconds(self.queue, 50),
        }
        return {name: round(value, 3) for name, value in figures.items()}


class Run:
    """One mode, measured through its gateway."""

    def __init__(self, args: argparse.Namespace, client: Client, limits: Any, requests: IO[str] | None) -> None:
        """`requests`: takes a JSON line a request."""
        self.args, self._client, self._limits, self._requests = args, client, limits, requests
        self.recorder = Recorder("gpu", args.json)
        self._runs = itertools.count(args.seed)
        self._idle: dict[int, Figures] = {}

    async def one_by_one(self, context: int) -> Figures:
        """Requests that each have the stack for themselves; once for each length."""
        if context not in self._idle:
            self._idle[context] = await self._measure(context, IDLE_OUTPUT, self.args.idle_requests, None)
        return self._idle[context]

    async def _measure(self, context: int, output: int, count: int, rate: float | None) -> Figures:
        seed = next(self._runs)
        plan = LoadPlan(LoadSpec(Uniform(context, context), Uniform(output, output), seed=seed), self._limits)
        records: list[Record] = []
        run = LoadRun(self._client, plan, Options(requests=count, timeout_s=120), records.append)
        await run.warm_up(SETTLE, 1)
        await (run.closed(1) if rate is None else run.open(rate))
        for record in records:
            if self._requests is not None:
                point = {"mode": self.args.mode, "context": context, "rate": rate}
                print(json.dumps({**point, **record.as_dict(run.started)}), file=self._requests, flush=True)
        return Figures(records)

    async def idle(self) -> Table:
        """`pd_idle`."""
        table = _table(
            f"{self.args.mode}, idle, ms", "prompt", "TTFT", "gap01", "gap01 p99", "step", "transfer", "vLLM"
        )
        for context in self.args.contexts:
            seen = await self.one_by_one(context)
            value, figures = milliseconds(seen.ttft, 50), seen.named()
            self._record("pd_idle", value, context=context, output=IDLE_OUTPUT, **figures)
            peer = PEER_IDLE.get(self.args.mode, {}).get(context)
            if peer is not None:
                self._record_peer("pd_idle", peer, context=context, output=IDLE_OUTPUT)
            table.add_row(
                f"{context}", f"{value:.1f}", f"{figures['gap01_p50']:.2f}", f"{figures['gap01_p99']:.2f}",
                f"{figures['itl_p50']:.2f}", f"{milliseconds(seen.transfer, 50):.1f}", f"{peer or ''}",
            )  # fmt: skip
        return table

    async def load(self) -> Table:
        """`pd_load`, each point beside a queue with one server that is fed with its arrivals."""
        table = _table(
            f"{self.args.mode}, loaded, ms", "load", "TTFT", "p99", "FIFO", "service", "ITL", "p99", "gap01", "p99",
            "vLLM",
        )  # fmt: skip
        for load in self.args.loads:
            alone = await self.one_by_one(load.context)
            seen = await self._measure(load.context, load.output, self.args.requests, load.rate)
            service = percentile(sorted(alone.prefill), 50)
            around = max(0.0, percentile(sorted(alone.ttft), 50) - service)  # what is not the prefill worker's
            services = served([r.first for r in seen.records], seen.prefill)
            sent = [r.sent for r in seen.records]
            queue, idle_queue = (
                milliseconds([wait + around for wait in fifo(sent, taken)], 50)
                for taken in (services, [service] * len(sent))
            )
            loaded = milliseconds(services, 50)
            value, figures = milliseconds(seen.ttft, 50), seen.named()
            self._record(
                "pd_load", value, rate=load.rate, context=load.context, output=load.output, requests=len(seen.ttft),
                fifo_ttft=round(queue, 3), service_ms=round(loaded, 3), fifo_idle_ttft=round(idle_queue, 3),
                service_idle_ms=round(service * 1e3, 3), **figures,
            )  # fmt: skip
            peer = PEER_LOAD.get(self.args.mode, {}).get(load)
            if peer is not None:
                self._record_peer("pd_load", peer[0], rate=load.rate, context=load.context, output=load.output,
                                  itl_p99=peer[1])  # fmt: skip
            table.add_row(
                f"{load.rate:g}/s {load.context}/{load.output}", f"{value:.1f}", f"{figures['ttft_p99']:.1f}",
                f"{queue:.1f}", f"{loaded:.1f}", f"{figures['itl_p50']:.2f}", f"{figures['itl_p99']:.2f}",
                f"{figures['gap01_p50']:.2f}", f"{figures['gap01_p99']:.2f}", " / ".join(map(str, peer or ())),
            )  # fmt: skip
        return table

    def _record(self, bench: str, value: float, **point: Any) -> None:
        kinds = {"mode": self.args.mode, "model": model_name(self.args), "dtype": self.args.dtype}
        figures = {name: point.pop(name) for name in list(point) if name not in ("rate", "context", "output")}
        self.recorder.add(bench, value, "ms", **kinds, **point, figures=figures)

    def _record_peer(self, bench: str, value: float, **point: Any) -> None:
        kinds = {"mode": self.args.mode, "model": model_name(self.args), "dtype": self.args.dtype}
        figures = {"itl_p99": point.pop("itl_p99")} if "itl_p99" in point else {}
        self.recorder.add(bench, value, "ms", peer=PEER, peer_source=PEER_SOURCE, **kinds, **point, figures=figures)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, justify="right")
    return table


async def measure(args: argparse.Namespace, address: str) -> None:
    """All parts against one stack; what was measured is shown even if a later part fails."""
    console = Console(width=120)
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(args.per_request.open("a")) if args.per_request else None
        async with Client(address) as client:
            run = Run(args, client, limits_of(await client.model("")), file)
            for part in args.parts or PARTS:
                console.print(await getattr(run, part)())


async def answers(args: argparse.Namespace, address: str) -> list[list[int]]:
    """Greedy tokens of the same prompts, all at once."""
    async with Client(address) as client:
        limits = limits_of(await client.model(""))

        async def one(number: int) -> list[int]:
            length = 17 + 211 * number
            plan = LoadPlan(LoadSpec(Uniform(length, length), Uniform(24, 24), seed=number), limits)
            run = LoadRun(client, plan, Options(requests=1))
            message = run._message(plan.request(0))
            return [token async for piece in client.start(message, 120) for token in piece.token_ids]

        return await asyncio.gather(*(one(number) for number in range(args.idle_requests)))


def check(args: argparse.Namespace, scratch: Path, logs: Path) -> None:
    """The same tokens, whoever prefills: a shallow model, whose results do not depend on the batch."""
    model = pd_stack.model_directory(args.config, scratch, num_hidden_layers=min(4, args.check_layers))
    invariant = ("--batch-invariant",) if args.devices[0] != "cpu" else ()
    flags = ("--kv-memory", "4GiB", "--dtype", args.dtype, *invariant, *args.worker)
    seen = []
    for mode in ("one", "disaggregated"):
        with pd_stack.running(mode, model, args.devices, logs, flags) as address:
            seen.append(asyncio.run(answers(args, address)))
    wrong = [number for number, (one, two) in enumerate(zip(*seen, strict=True)) if one != two or len(one) != 24]
    print(f"check: {len(seen[0])} answers of 24 tokens, {len(wrong)} differ: {wrong}")
    if wrong:
        raise SystemExit(1)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode", choices=[*MODES, "check"])
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS], help="all, by default")
    pd_stack.add_arguments(parser, CONFIG)
    parser.add_argument("--loads", type=_load, nargs="*", default=LOADS, metavar="RATE:IN:OUT")
    parser.add_argument("--requests", type=int, default=200, help="of a load")
    parser.add_argument("--idle-requests", type=int, default=20, help="of a length")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--check-layers", type=int, default=4)
    parser.add_argument("--per-request", type=Path, metavar="FILE", help="append a JSON line a request")
    return parser.parse_args()


def _load(text: str) -> Load:
    rate, context, output = text.split(":")
    number = float(rate)
    return Load(int(number) if number.is_integer() else number, int(context), int(output))


def main() -> None:
    """One mode."""
    args = arguments()
    with tempfile.TemporaryDirectory() as scratch:
        logs = args.logs or Path(scratch)
        logs.mkdir(parents=True, exist_ok=True)
        if args.mode == "check":
            check(args, Path(scratch), logs)
            return
        model = pd_stack.model_directory(args.config, Path(scratch))
        flags = ("--dtype", args.dtype, *args.worker)
        with pd_stack.running(args.mode, model, args.devices, logs, flags) as address:
            asyncio.run(measure(args, address))


if __name__ == "__main__":
    main()
