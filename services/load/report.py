"""A load's figures for people (a table) and for result files (a JSON line, as `benchmarks/record.py` writes them)."""

import datetime
import importlib.metadata
import math
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from .statistics import Sample
from .tally import Tally

PERCENTILES = (50, 90, 99)
LATE_S = 0.01  # a generator later than this measures itself


@dataclass(frozen=True, slots=True)
class Result:
    """A run. `point` says which: mode, concurrency or rate, lengths."""

    point: Mapping[str, Any]
    tally: Tally


def measures(tally: Tally) -> dict[str, Sample]:
    """By the names that they have in tables and files."""
    return {
        "ttft": tally.ttft,
        "gap01": tally.gap01,
        "itl": tally.itl,
        "tpot": tally.tpot,
        "e2e": tally.end_to_end,
        "lateness": tally.lateness,
    }


def ms(seconds: float | None) -> str:
    """Three or more digits, or a dash."""
    if seconds is None:
        return "-"
    value = seconds * 1e3
    return f"{value:.0f}" if abs(value) >= 99.5 else f"{value:.1f}" if abs(value) >= 9.95 else f"{value:.2f}"


def headline(tally: Tally) -> list[str]:
    """What came of it, in lines."""
    ended = tally.succeeded + tally.failed
    lines = [
        f"{tally.succeeded} of {ended} requests succeeded in {tally.seconds:.1f} s: "
        f"{tally.a_second(tally.succeeded):.2f} requests/s, {tally.a_second(tally.input_tokens):.0f} tokens/s in, "
        f"{tally.a_second(tally.output_tokens):.1f} tokens/s out, {tally.cached_share:.0%} of the prompts cached"
    ]
    for status, count in tally.errors.most_common():
        lines.append(f"{status}: {count} ({count / ended:.1%}), the first one: {tally.messages[status] or 'no words'}")
    if tally.cut:
        lines.append(f"{tally.cut} requests had lengths drawn that do not fit the model, and were shortened")
    if not tally.complete:
        lines.append(f"INCOMPLETE: ended early, {tally.cancelled} requests under way were cancelled and not counted")
    late = tally.lateness.percentile(99)
    if late is not None and late > LATE_S:
        lines.append(f"this client was late (p99 {ms(late)} ms): it measures itself; give it more of the machine")
    return lines


def table(tally: Tally) -> Table:
    """A row for each measure, in milliseconds."""
    rows = {
        "time to first token": tally.ttft,
        "gap01: token 0 to 1": tally.gap01,
        "ITL: later gaps": tally.itl,
        "TPOT: a token after the first": tally.tpot,
        "end to end": tally.end_to_end,
        "sent later than planned": tally.lateness,
    }
    shown = Table("ms", *(f"p{percent}" for percent in PERCENTILES), "mean", "max", "n")
    for column in shown.columns[1:]:
        column.justify = "right"
    for name, sample in rows.items():
        if sample is not tally.lateness or sample.count:
            values = [*(sample.percentile(percent) for percent in PERCENTILES), sample.mean, sample.maximum]
            shown.add_row(name, *map(ms, values), str(sample.count))
    return shown


def sweep_table(results: Sequence[Result]) -> Table:
    """A row for each run of a sweep, narrow enough for any terminal; milliseconds, p50/p99. `*`: incomplete."""
    columns = ("at once", "ok", "failed", "req/s", "tok/s out", "cached", "TTFT", "gap01", "ITL")
    shown = Table(*columns, box=box.SIMPLE_HEAD, padding=0, show_edge=False)
    for column in shown.columns:
        column.justify, column.no_wrap = "right", True
    for result in results:
        tally = result.tally
        shown.add_row(
            str(result.point["concurrency"]) + ("" if tally.complete else "*"),
            str(tally.succeeded),
            str(tally.failed),
            f"{tally.a_second(tally.succeeded):.2f}",
            f"{tally.a_second(tally.output_tokens):.1f}",
            f"{tally.cached_share:.0%}",
            *(f"{ms(each.percentile(50))}/{ms(each.percentile(99))}" for each in (tally.ttft, tally.gap01, tally.itl)),
        )
    return shown


def result_line(result: Result, stamp: Mapping[str, Any]) -> dict[str, Any]:
    """A line of a result file: `value` is the median time to first token; the rest is under `figures`."""
    tally = result.tally
    figures: dict[str, Any] = {
        "complete": tally.complete,
        "requests": tally.succeeded,
        "errors": dict(tally.errors),
        "error_rate": rounded(tally.error_rate),
        "seconds": rounded(tally.seconds),
        "requests_s": rounded(tally.a_second(tally.succeeded)),
        "input_tokens_s": rounded(tally.a_second(tally.input_tokens)),
        "output_tokens_s": rounded(tally.a_second(tally.output_tokens)),
        "cached_share": rounded(tally.cached_share),
        "cut": tally.cut,
    }
    for name, sample in measures(tally).items():
        for percent in PERCENTILES:
            figures[f"{name}_p{percent}"] = in_ms(sample.percentile(percent))
    value, p99 = (in_ms(tally.ttft.percentile(percent)) for percent in (50, 99))
    line = {"bench": "load", **result.point, "value": value, "unit": "ms", "p99": p99, "peer": None}
    return {**line, "figures": figures, **stamp}


def rounded(value: float) -> float:
    """Four decimals; files hold no infinity."""
    return round(value, 4) if math.isfinite(value) else 0.0


def in_ms(seconds: float | None) -> float | None:
    """Milliseconds for a file."""
    return None if seconds is None else rounded(seconds * 1e3)


def machine_stamp(labels: Mapping[str, str]) -> dict[str, Any]:
    """This machine, the versions, the code and the command. A label `gpu` says that the workers have one."""
    return {
        **({} if "gpu" in labels else {"cpu": _cpu()}),
        "torch": _version("torch"),
        "triton": _version("triton"),
        "commit": _commit(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["twostroke", *sys.argv[1:]]),
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str:
    command = ["git", "-C", str(Path(__file__).resolve().parent), "rev-parse", "--short", "HEAD"]
    try:
        run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return run.stdout.strip() or "unknown"


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return "unknown"
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")
