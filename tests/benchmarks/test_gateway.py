"""The gateway's benchmark, each measure for half a second."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "gateway.py"


def run(*words: str) -> dict[str, Any]:
    """What it tells as JSON."""
    command = [sys.executable, str(PROGRAM), "--seconds", "0.5", "--json", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    told: dict[str, Any] = json.loads(done.stdout)
    return told


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="the gateway and its clients take a core each")
def test_every_rate_is_recorded(tmp_path: Path) -> None:
    out = tmp_path / "gateway.jsonl"
    told = run("--only", "bare,messages,coalesced,events,latency", "--out", str(out))
    goals = {goal["goal"]: goal for goal in told["goals"]}
    assert len(goals) == 5
    assert all(goal["value"] > 0 for goal in goals.values())
    assert list(told["measured"]) == ["bare", "messages", "coalesced", "events", "latency-8", "latency-25"]
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["measure"] for line in lines] == ["messages", "messages", "coalesced", "events", "latency", "latency"]
    assert all(line["bench"] == "gateway" and line["value"] > 0 for line in lines)
    bare, messages, coalesced, events = lines[:4]
    assert bare["peer"] is not None
    assert messages["peer"] is None
    for line in (bare, messages, events):
        assert line["figures"]["tokens_a_message"] == 1.0
    assert coalesced["figures"]["tokens_a_message"] > 2.0
    assert all(line["p99"] >= line["value"] for line in lines[4:])


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_several_processes_are_compared_with_one(tmp_path: Path) -> None:
    out = tmp_path / "gateway.jsonl"
    told = run("--processes", "2", "--out", str(out))
    assert [goal["wanted"] for goal in told["goals"]] == [1.8]
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(line["measure"], line["processes"]) for line in lines] == [("processes", 1), ("processes", 2)]
    assert all(line["value"] > 0 and line["figures"]["least"] >= 0 for line in lines)


def test_goals_are_judged_by_what_was_measured(benchmark: Callable[[str], ModuleType]) -> None:
    verdicts = benchmark("gateway_goals").verdicts
    noted = {"bare": [50e3, 70e3], "messages": [40e3, 46e3], "latency-8": [2.5], "idle": [1024.0]}
    told = verdicts(noted)
    assert [(verdict.passed, round(verdict.value, 2)) for verdict in told] == [
        (True, round(43 / 60, 2)),
        (False, 2.5),
        (True, 1024.0),
    ]
    assert str(told[1]).startswith("FAIL: added latency")
    assert verdicts({}) == []


def test_parts_are_whole(benchmark: Callable[[str], ModuleType]) -> None:
    assert benchmark("gateway_many").parts(10, 3) == [(0, 3), (3, 3), (6, 4)]
