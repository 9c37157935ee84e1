"""Idle time from a trace: which kernel belongs to which step, and what lies between."""

import json
from collections.abc import Callable
from types import ModuleType

import pytest

Load = Callable[[str], ModuleType]


def event(cat: str, name: str, ts: float, dur: float, correlation: int | None = None) -> dict[str, object]:
    args = {} if correlation is None else {"correlation": correlation}
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "args": args}


def trace() -> dict[str, object]:
    """Two steps launched ahead of what the GPU does, and a third without kernels."""
    events = [
        {"ph": "M", "name": "process_name", "ts": 0},
        event("user_annotation", "twostroke step", 100, 50),
        event("user_annotation", "twostroke step", 200, 50),
        event("user_annotation", "twostroke step", 400, 50),
        event("gpu_user_annotation", "twostroke step", 300, 1000),
        event("cuda_runtime", "cudaGraphLaunch", 110, 5, 1),
        event("cuda_driver", "cuLaunchKernelEx", 120, 5, 2),
        event("cuda_runtime", "cudaGraphLaunch", 210, 5, 3),
        event("cuda_runtime", "cudaLaunchKernel", 50, 5, 9),
        event("kernel", "before all", 60, 5, 9),
        event("kernel", "graph, a", 1000, 10, 1),
        event("kernel", "graph, b", 1012, 10, 1),
        event("kernel", "overlaps b", 1020, 5, 2),
        event("kernel", "launch unknown", 1026, 4, 77),
        event("gpu_memcpy", "Memcpy DtoH", 1030, 4, 2),
        event("kernel", "graph, next", 1050, 100, 3),
    ]
    return {"traceEvents": events}


def test_kernels_go_with_the_call_that_launched_them(benchmark: Load) -> None:
    steps = benchmark("gpu_trace").step_work(trace())
    assert [(step.begin, step.end, step.kernels, step.busy) for step in steps] == [
        (1000, 1030, 4, 10 + 13 + 4),
        (1050, 1150, 1, 100),
    ]


def test_gaps(benchmark: Load) -> None:
    module = benchmark("gpu_trace")
    steps = module.step_work(trace())
    assert module.gaps_between(steps) == [20]
    assert module.idle_within(steps) == [3, 0]
    overlapping = [module.StepWork(0, 10, 1, 10), module.StepWork(8, 20, 1, 12)]
    assert module.gaps_between(overlapping) == [0]
    assert module.gaps_between([]) == module.idle_within([]) == []


def test_the_profilers_own_file_is_read(benchmark: Load) -> None:
    from torch.profiler import ProfilerActivity, profile, record_function

    module = benchmark("gpu_trace")
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for _ in range(3):
            with record_function(module.MARK):
                pass
    read = module.read_trace(profiler)
    marks = [e for e in read["traceEvents"] if e.get("cat") == "user_annotation" and e["name"] == module.MARK]
    assert len(marks) == 3
    assert module.step_work(read) == []
    json.dumps(read)


class Runner:
    """A stand-in that launches steps which take and tell some time."""

    def __init__(self, step: object) -> None:
        self._step = step

    def launch(self, rows: list[int], hook: None) -> object:
        return self._step


class Telling:
    waited_s = 0.25
    extra = "kept"

    def tokens(self) -> list[int]:
        return [1, 2]


class Silent:
    def tokens(self) -> list[int]:
        raise ValueError("lost")


def test_host_time_is_what_the_step_did_not_wait(benchmark: Load) -> None:
    engine = type("Engine", (), {"runner": Runner(Telling())})()
    clock = benchmark("host_time").HostTime(engine)
    with clock:
        for _ in range(2):
            with clock.step():
                launched = engine.runner.launch([], None)
                assert launched.tokens() == [1, 2]
                assert launched.extra == "kept"
    assert clock.waited == [0.25, 0.25]
    assert all(busy < 0 for busy in clock.busy)  # it told of more than there was
    assert type(engine.runner.launch([], None)) is Telling


def test_a_step_that_does_not_tell_waits_for_the_whole_call(benchmark: Load) -> None:
    engine = type("Engine", (), {"runner": Runner(Silent())})()
    clock = benchmark("host_time").HostTime(engine)
    with clock, clock.step(), pytest.raises(ValueError, match="lost"):
        engine.runner.launch([], None).tokens()
    assert len(clock.waited) == 1
    assert clock.waited[0] > 0
    assert clock.busy[0] >= 0
