"""The gateway's benchmark, each measure for half a second."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "gateway.py"


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="the gateway and its clients take a core each")
def test_every_rate_is_recorded(tmp_path: Path) -> None:
    out = tmp_path / "gateway.jsonl"
    wanted = "bare,messages,coalesced,events,latency"
    words = [sys.executable, str(PROGRAM), "--seconds", "0.5", "--only", wanted, "--out", str(out)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
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
