"""What `twostroke bench` does: one run, or one for each point of a sweep; tables, files and a plot of them."""

import asyncio
import dataclasses
import json
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from rich.console import Console

from ...errors import Unavailable
from ...v1 import inference_pb2 as pb
from ..client.access import OPEN, Access
from ..client.client import Client
from .plan import Limits, LoadPlan, LoadSpec
from .plot import plot_sweep
from .progress import progress
from .record import Record
from .report import Result, headline, machine_stamp, result_line, sweep_table, table
from .run import LoadRun, Options
from .tally import Tally

LEAST_REQUESTS = 32
INTERRUPTED = 130


@dataclass(frozen=True, slots=True)
class BenchPlan:
    """What was asked for, checked."""

    address: str
    spec: LoadSpec
    options: Options
    concurrencies: tuple[int, ...] = (4,)  # more than one: a sweep
    rate: float | None = None  # instead of a concurrency
    sweep: bool = False
    warm_up: int = 0
    channels: int = 1
    labels: Mapping[str, str] = field(default_factory=dict)
    plot: Path | None = None
    access: Access = OPEN

    def run_options(self, slots: int) -> Options:
        """With the number of requests, where nothing says when to end."""
        if self.options.requests is not None or self.options.duration_s is not None:
            return self.options
        return dataclasses.replace(self.options, requests=max(LEAST_REQUESTS, 4 * slots))

    def point(self, slots: int, model: str) -> dict[str, Any]:
        """What a run is known by in result files."""
        spec = self.spec
        load = {"mode": "closed", "concurrency": slots} if self.rate is None else {"mode": "open", "rate": self.rate}
        point: dict[str, Any] = {"model": model, **load, "input": str(spec.input), "output": str(spec.output)}
        if spec.prefix_tokens:
            point["shared_prefix"] = f"{spec.prefix_tokens}:{spec.prefix_groups}"
        return {**point, "seed": spec.seed, **self.labels}

    def title(self, slots: int) -> str:
        """The same for people."""
        spec = self.spec
        load = f"{slots} at once" if self.rate is None else f"{self.rate:g} requests a second"
        load = "sweep" if self.sweep else load
        prefix = f"{spec.prefix_tokens} shared in {spec.prefix_groups} groups + " if spec.prefix_tokens else ""
        return f"{load}, input {prefix}{spec.input}, output {spec.output}, seed {spec.seed}"


def limits_of(model: pb.GetModelResponse) -> Limits:
    """The limits of a served model."""
    return Limits.of(
        context=model.context_length,
        max_input=model.max_input_tokens,
        max_output=model.max_output_tokens,
        vocabulary=model.vocabulary_size,
        without={*model.eos_token_ids, *model.special_token_ids},
    )


class Bench:
    """Runs a plan. Ctrl-C ends it early, with what was seen; a second one at once."""

    def __init__(
        self, plan: BenchPlan, console: Console, json_file: IO[str] | None, per_request: IO[str] | None
    ) -> None:
        """`json_file` gets a line a run, `per_request` a line a request."""
        self._plan, self._console, self._json_file, self._per_request = plan, console, json_file, per_request
        self._stopped = False
        self._run: LoadRun | None = None

    async def run(self) -> int:
        """Returns the exit code: 0 when a request succeeded."""
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, self.interrupt)
        plan = self._plan
        async with Client(plan.address, channels=plan.channels, access=plan.access) as client:
            model = await client.model(plan.options.model)
            if not model.prefill_workers and not model.decode_workers:
                raise Unavailable(f"the gateway at {plan.address} has no worker that is ready")
            results = await self._runs(client, model)
        if plan.sweep and results:
            self._show_sweep(results, model.model)
        if self._stopped:
            return INTERRUPTED
        return 0 if any(result.tally.succeeded for result in results) else 1

    def interrupt(self) -> None:
        """Ends the run that is under way, and the sweep."""
        if self._stopped:
            raise KeyboardInterrupt
        self._stopped = True
        if self._run is not None:
            self._run.stop()

    async def _runs(self, client: Client, model: pb.GetModelResponse) -> list[Result]:
        limits, stamp = limits_of(model), await asyncio.to_thread(machine_stamp, self._plan.labels)
        plans = [LoadPlan(self._plan.spec, limits, run=number) for number in range(len(self._plan.concurrencies))]
        results: list[Result] = []
        for slots, load in zip(self._plan.concurrencies, plans, strict=True):
            if self._stopped:
                break
            result = Result(self._plan.point(slots, model.model), await self._one(client, load, slots, bool(results)))
            results.append(result)
            if self._json_file is not None:
                print(json.dumps(result_line(result, stamp)), file=self._json_file, flush=True)
            if not self._plan.sweep:
                self._show(result, slots)
        return results

    async def _one(self, client: Client, load: LoadPlan, slots: int, warm: bool) -> Tally:
        options = self._plan.run_options(slots)

        def on_end(record: Record) -> None:
            bar.update()
            if self._per_request is not None:
                print(json.dumps(record.as_dict(run.started)), file=self._per_request)

        run = self._run = LoadRun(client, load, options, on_end)
        with progress(run, options, self._plan.title(slots).split(",")[0]) as bar:
            if not warm:
                await self._warm_up(run, slots)
            bar.measuring()
            rate = self._plan.rate
            await (run.closed(slots) if rate is None else run.open(rate))
        self._run = None
        return run.tally

    async def _warm_up(self, run: LoadRun, slots: int) -> None:
        tally = await run.warm_up(self._plan.warm_up, slots)
        for status, message in tally.messages.items():
            text = f"warm-up: {tally.errors[status]} failed with {status}: {message}"
            self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def _show(self, result: Result, slots: int) -> None:
        lines = [self._plan.title(slots), *headline(result.tally)]
        self._console.print("\n".join(lines), highlight=False, markup=False, soft_wrap=True)
        self._console.print(table(result.tally))

    def _show_sweep(self, results: Sequence[Result], model: str) -> None:
        lines = [self._plan.title(0)]
        for result in results:
            lines += [f"{result.point['concurrency']} at once: {line}" for line in headline(result.tally)[1:]]
        self._console.print("\n".join(lines), highlight=False, markup=False, soft_wrap=True)
        self._console.print(sweep_table(results))
        if self._plan.plot is not None:
            plot_sweep(results, self._plan.plot, f"{model}: {self._plan.title(0)}")
            self._console.print(f"drawn: {self._plan.plot}", highlight=False, markup=False, soft_wrap=True)
