"""The mixed load on a CPU and a tiny model; its figures from known times; the picture."""

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


def sweep(benchmark: Load, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[dict[str, object]]:
    directory = tiny.make_tiny_llama(tmp_path / "tiny", layers=1, hidden=32)
    module, out = benchmark("gpu_mixed"), tmp_path / "out.jsonl"
    monkeypatch.setattr(module, "SETTLE_S", 0.02)
    flags = ["--device", "cpu", "--config", str(directory), "--dtype", "float32", "--page-size", "16"]
    flags += ["--decoding", "3", "--context", "20", "--tokens", "1500", "--prompt", "200", "--output", "3"]
    flags += ["--rate", "20", "--seconds", "0.3", "--budgets", "32", "256", "--json", str(out)]
    monkeypatch.setattr(sys, "argv", ["gpu_mixed.py", *flags])
    module.main()
    return [json.loads(line) for line in out.read_text().splitlines()]


def test_a_sweep(benchmark: Load, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    lines = sweep(benchmark, monkeypatch, tmp_path)
    assert [line["token_budget"] for line in lines] == [32, 256]
    for line in lines:
        figures = line["figures"]
        assert (line["bench"], line["mode"], line["decoding"], line["unit"]) == ("mixed", "both", 3, "ms")
        assert 0 < line["value"] <= line["p99"] <= figures["itl_max"]
        assert 0 < figures["ttft_p50"] <= figures["ttft_p99"]
        assert figures["whole"]
        assert figures["prefill_tokens_s"] > 0
    assert benchmark("plot_mixed").newest_sweep(lines) == lines


def test_the_budget_that_is_set_holds(benchmark: Load, tmp_path: Path) -> None:
    directory = tiny.make_tiny_llama(tmp_path / "tiny", layers=1, hidden=32)
    args = type("Args", (), {"config": directory, "dtype": "float32", "device": "cpu", "page_size": 16, "set": []})()
    with benchmark("bench_engine").built(args, sequences=1, pages=20, token_budget=256) as bench:
        for budget, steps in ((64, 4), (256, 1)):
            benchmark("gpu_mixed").set_budget(bench, budget)
            before = bench.core.load().steps
            bench.run(bench.prompts(1, 200), 1)
            assert bench.core.load().steps - before == steps


def test_figures_of_known_times(benchmark: Load) -> None:
    module = benchmark("gpu_mixed")
    stream = benchmark("bench_engine").Stream
    load = module.Load(1, 10, 99, 100, 1, 1.0, 2.0)
    decoding = [stream(0.0, [1.0, 1.1, 1.2, 1.5, 2.5, 9.0])]
    arrived = [stream(1.2, [1.6]), stream(1.6, [2.5]), stream(2.0, [])]
    outcome = module._outcome(load, decoding, arrived, [1.2, 1.5, 2.0], (1.0, 1.2), 7, False)
    assert (outcome.quiet.count, outcome.itl.count, outcome.ttft.count) == (2, 2, 2)
    assert outcome.itl.maximum == pytest.approx(1.0)
    assert outcome.ttft.maximum == pytest.approx(1.0)  # from when it was due, not when it was handed in
    assert outcome.busy == pytest.approx(1.3)
    assert outcome.prefill_rate == pytest.approx(200 / 1.3)
    assert not outcome.whole


def test_an_overloaded_run_ends(benchmark: Load, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    module = benchmark("gpu_mixed")
    monkeypatch.setattr(module, "LATE", 0)
    monkeypatch.setattr(module, "SETTLE_S", 0.0)
    directory = tiny.make_tiny_llama(tmp_path / "tiny", layers=1, hidden=32)
    args = type("Args", (), {"config": directory, "dtype": "float32", "device": "cpu", "page_size": 16, "set": []})()
    with benchmark("bench_engine").built(args, sequences=4, pages=80, token_budget=32) as bench:
        outcome = module.run(bench, module.Load(2, 10, 50, 100, 1, 100.0, 1.0), 32)
        assert not outcome.whole
        assert not bench.core.has_work()


def test_the_newest_sweep_is_drawn(benchmark: Load, tmp_path: Path) -> None:
    module = benchmark("plot_mixed")
    figures = {"quiet_itl_p50": 5.0, "ttft_p50": 200.0, "ttft_p99": 300.0, "prefill_tokens_s": 40000}
    point = {"bench": "mixed", "model": "m", "dtype": "bfloat16", "gpu": "H200", "decoding": 48, "prompt": 8192}
    point |= {"rate": 2.0, "context": 1024, "p99": 20.0, "figures": figures}
    lines = [
        {**point, "token_budget": budget, "value": value, "date": date, "rate": rate}
        for budget, value, date, rate in (
            (512, 1.0, "2026-01-01", 1.0), (512, 9.0, "2026-01-02", 2.0), (1024, 8.0, "2026-01-03", 2.0),
            (512, 7.0, "2026-01-04", 2.0), (2048, 6.0, "2026-01-02", 2.0),
        )
    ]  # fmt: skip
    newest = module.newest_sweep([{"bench": "cpu"}, *lines])
    assert [(line["token_budget"], line["value"]) for line in newest] == [(512, 7.0), (1024, 8.0), (2048, 6.0)]
    with pytest.raises(ValueError, match="gpu_mixed"):
        module.newest_sweep([])
    pytest.importorskip("matplotlib")
    module.draw(newest, tmp_path / "mixed.png")
    assert (tmp_path / "mixed.png").read_bytes().startswith(b"\x89PNG")
