"""The stations of a hand-over: how they are read, and that real workers come by all of them."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

STATIONS = ("computed", "taken in", "complete", "written", "received", "read", "arrived", "launch", "launched")
TINY = {
    "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "num_hidden_layers": 2, "vocab_size": 512, "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip


@pytest.fixture
def handover(benchmark: Callable[[str], ModuleType]) -> ModuleType:
    return benchmark("gpu_handover")


def line(request: str, station: str, at: float) -> str:
    return json.dumps({"request": request, "station": station, "at": at})


def test_times_count_from_the_end_of_the_prompt(handover: ModuleType) -> None:
    assert handover.STATIONS == STATIONS
    later = [line("b", station, 9.0 + 0.001 * number) for number, station in enumerate(STATIONS)]
    first = [line("a", station, 5.0 + 0.002 * number) for number, station in enumerate(STATIONS)]
    again = [line("a", "received", 7.0)]  # by the slower way
    partial = [line("c", station, 1.0) for station in STATIONS[:-1]]
    one, two = handover.ways([*later, *reversed(first), *again, *partial])
    assert one == pytest.approx({station: 2.0 * number for number, station in enumerate(STATIONS)})
    assert two == pytest.approx({station: 1.0 * number for number, station in enumerate(STATIONS)})


@pytest.mark.slow
def test_workers_come_by_all_stations(tmp_path: Path) -> None:
    program = Path(__file__).parents[2] / "benchmarks" / "gpu_handover.py"
    config, results = tmp_path / "config.json", tmp_path / "results.jsonl"
    llama = json.loads((program.parent / "configs" / "llama-3.1-8b.json").read_text())
    config.write_text(json.dumps({**llama, **TINY}))
    subprocess.run(
        [
            sys.executable, str(program), "--devices", "cpu", "cpu", "--config", str(config), "--dtype", "float32",
            "--contexts", "40", "200", "--requests", "3", "--json", str(results), "--worker", "--kv-memory", "64MiB",
        ],
        check=True,
        timeout=240,
    )  # fmt: skip
    lines = [json.loads(text) for text in results.read_text().splitlines()]
    assert [(told["bench"], told["context"]) for told in lines] == [("pd_handover", 40), ("pd_handover", 200)]
    for told in lines:
        times = [told["figures"][station] for station in STATIONS]
        assert times[0] == 0.0
        assert times[STATIONS.index("launch")] == pytest.approx(told["value"], abs=0.01)
        assert times[-1] > 0.0
