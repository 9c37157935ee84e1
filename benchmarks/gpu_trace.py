"""When the GPU was idle between steps, read off the timestamps of its kernels (a trace of torch.profiler)."""

import itertools
import json
import tempfile
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MARK = "twostroke step"  # the range around each call that launches a step
LAUNCHES = ("cuda_runtime", "cuda_driver")


@dataclass(frozen=True, slots=True)
class StepWork:
    """The kernels that one call launched; microseconds."""

    begin: float  # of the first
    end: float  # of the last
    kernels: int
    busy: float  # during which at least one ran


def read_trace(profiler: Any) -> Mapping[str, Any]:
    """`profiler`: a torch.profiler.profile that has ended."""
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "trace.json"
        profiler.export_chrome_trace(str(path))
        trace: Mapping[str, Any] = json.loads(path.read_text())
    return trace


def step_work(trace: Mapping[str, Any]) -> list[StepWork]:
    """Each marked call's kernels, in order; calls without any are left out.

    A kernel belongs to the call during which it was launched; those of a CUDA graph carry the correlation of the
    graph's launch. One whose launch is not in the trace goes with the kernel before it.
    """
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X" and "cat" in event]
    marks = sorted(event["ts"] for event in events if event["name"] == MARK and event["cat"] == "user_annotation")
    launched = {event["args"].get("correlation"): event["ts"] for event in events if event["cat"] in LAUNCHES}
    kernels = sorted((event for event in events if event["cat"] == "kernel"), key=lambda event: event["ts"])
    calls: dict[int, list[tuple[float, float]]] = {}
    call = -1
    for kernel in kernels:
        when = launched.get(kernel["args"].get("correlation"))
        call = call if when is None else bisect_right(marks, when) - 1
        if call >= 0:
            calls.setdefault(call, []).append((kernel["ts"], kernel["ts"] + kernel["dur"]))
    return [_work(spans) for _, spans in sorted(calls.items())]


def _work(spans: Sequence[tuple[float, float]]) -> StepWork:
    """`spans`: sorted by their beginnings; kernels may overlap."""
    busy, reached = 0.0, float("-inf")
    for begin, end in spans:
        busy += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return StepWork(spans[0][0], reached, len(spans), busy)


def gaps_between(steps: Sequence[StepWork]) -> list[float]:
    """Microseconds from the last kernel of a step to the first of the next; 0 where they overlap."""
    return [max(0.0, after.begin - before.end) for before, after in itertools.pairwise(steps)]


def idle_within(steps: Sequence[StepWork]) -> list[float]:
    """Microseconds of each step during which none of its kernels ran: the gaps between them, summed."""
    return [step.end - step.begin - step.busy for step in steps]
