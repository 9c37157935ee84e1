"""The GPU benchmark on a CPU and a tiny model: every part runs and records what the format says."""

import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

Load = Callable[[str], ModuleType]
spec = importlib.util.spec_from_file_location("tiny", Path(__file__).parent.parent / "tiny.py")
assert spec is not None
assert spec.loader is not None
tiny = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tiny)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory: Path = tiny.make_tiny_llama(tmp_path_factory.mktemp("tiny") / "tiny", layers=1, hidden=32)
    return directory


def run(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch, config: Path, out: Path, *flags: str
) -> list[dict[str, object]]:
    words = ["--device", "cpu", "--config", str(config), "--dtype", "float32", "--page-size", "16", "--json", str(out)]
    monkeypatch.setattr(sys, "argv", [f"{module.__name__}.py", *flags, *words])
    module.main()
    return [json.loads(line) for line in out.read_text().splitlines()]


def test_every_part(
    benchmark: Load, monkeypatch: pytest.MonkeyPatch, config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--decode", "2x20", "3x5", "--prefill", "2x40", "--idle", "2x8", "--steps", "6", "--token-budget", "64"]
    lines = run(benchmark("gpu"), monkeypatch, config, tmp_path / "out.jsonl", *flags)
    by_bench = {str(line["bench"]): line for line in lines}
    assert set(by_bench) == {"start", "decode_step", "prefill", "host_step", "host_wait"}  # no GPU, no idle time
    decode = by_bench["decode_step"]
    assert (decode["batch"], decode["context"], decode["unit"], decode["dtype"]) == (3, 5, "ms", "float32")
    assert by_bench["prefill"]["value"] > 0
    assert by_bench["host_step"]["goal"] == "<= 1"
    assert {line["mode"] for line in lines if line["bench"] == "start"} >= {"imports", "engine, whole"}
    assert all(line["peer"] is None and line["model"] == "tiny" for line in lines)  # other sizes: nothing to compare
    assert "3 x 5" in capsys.readouterr().out


def test_the_points_are_those_of_the_design(benchmark: Load) -> None:
    targets = benchmark("targets")
    assert [t.peer for t in targets.DECODE.values()] == [4.98, 5.30, 6.27, 7.71, 10.88, 18.44, 13.33]
    assert [t.peer for t in targets.PREFILL.values()] == [32200, 39500, 38400, 33500, 42400]
    assert all(t.limit < t.goal < t.peer for t in targets.DECODE.values())
    assert all(t.limit > t.goal >= t.peer for t in targets.PREFILL.values())


def test_the_peers_line(benchmark: Load, tmp_path: Path) -> None:
    record, targets = benchmark("record"), benchmark("targets")
    recorder = record.Recorder("gpu", tmp_path / "out.jsonl")
    targets.record_peer(recorder, "decode_step", targets.DECODE[32, 8192], "ms", (32, 8192))
    line = json.loads((tmp_path / "out.jsonl").read_text())
    assert (line["value"], line["peer"], line["batch"], line["context"]) == (13.33, "vLLM 0.26.0", 32, 8192)
    assert "H200" in line["peer_source"]


def test_the_committed_configuration(benchmark: Load) -> None:
    from twostroke.engine.model_config import ModelConfig

    config = ModelConfig.from_dicts(json.loads(benchmark("bench_engine").CONFIG.read_text()), {})
    assert (config.layers, config.hidden_size, config.heads, config.kv_heads, config.head_dim) == (32, 4096, 32, 8, 128)
    assert (config.intermediate_size, config.vocab_size, config.tied) == (14336, 128256, False)


def test_a_request_that_lacks_tokens_is_an_error(benchmark: Load, config: Path) -> None:
    module = benchmark("bench_engine")
    args = type("Args", (), {"config": config, "dtype": "float32", "device": "cpu", "page_size": 16, "set": []})()
    with module.built(args, sequences=2, pages=8, token_budget=32) as bench:
        assert bench.run(bench.prompts(2, 10), 3) > 0
        assert all(len(list(stream.gaps)) == 2 for stream in bench.streams.values())
        bench.core.step = lambda: (bench.core.cancel(next(iter(bench.streams))), type(bench.core).step(bench.core))[1]
        with pytest.raises((RuntimeError, IndexError)):
            bench.run(bench.prompts(2, 10), 3)
