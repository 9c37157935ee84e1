"""The page made of result files: what supersedes what, and a peer's figures beside ours."""

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

Load = Callable[[str], ModuleType]


@pytest.fixture
def report(benchmark: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, on an empty folder of results and an empty page."""
    monkeypatch.setattr(benchmark("record"), "RESULTS", tmp_path / "results")
    module = benchmark("report")
    monkeypatch.setattr(module, "PAGE", tmp_path / "docs" / "performance.md")
    (tmp_path / "docs").mkdir()
    return module


def record(benchmark: Load, name: str = "gpu") -> object:
    recorder = benchmark("record").Recorder(name)
    recorder._stamp |= {"gpu": "NVIDIA H200", "commit": "abc1234", "command": "python benchmarks/gpu.py"}
    recorder._stamp.pop("cpu", None)
    return recorder


def test_ours_beside_a_peer_of_another_day(benchmark: Load, report: ModuleType) -> None:
    targets, recorder = benchmark("targets"), record(benchmark)
    kinds = {"model": targets.MODEL, "dtype": "bfloat16", "kv_dtype": "bfloat16"}
    for value in (5.5, 4.482):  # the later one supersedes
        recorder.add("decode_step", value, "ms", **kinds, batch=1, context=1024, goal="<= 4.3", limit="3.6",
                     figures={"median_step": value, "runs": 3})  # fmt: skip
    recorder.add("decode_step", 9.0, "ms", **kinds, batch=2, context=99, figures={"median_step": 9.0, "runs": 3})
    targets.record_peer(recorder, "decode_step", targets.DECODE[1, 1024], "ms", (1, 1024))
    page = report.page()
    assert "| batch | context | ours, ms | vLLM 0.26.0, ms | ours / theirs | goal | limit | commit | date |" in page
    assert "| 1 | 1024 | 4.48 | 4.98 | 0.900 | <= 4.3 | 3.6 | abc1234 |" in page
    assert "| 2 | 99 | 9 |  |  |  |  | abc1234 |" in page
    assert "5.5 |" not in page
    assert f"vLLM 0.26.0: {targets.PEER_SOURCE}." in page
    assert "NVIDIA H200, llama-3.1-8b, bfloat16" in page


def test_other_benches_keep_the_plain_table(benchmark: Load, report: ModuleType) -> None:
    recorder = record(benchmark)
    recorder.add("host_step", 0.71, "ms", p99=1.2, batch=256, context=1024, goal="<= 1")
    recorder.add("cpu", 80.0, "tokens/s", mode="one stream")
    recorder.add("cpu", 46.0, "tokens/s", mode="one stream", peer="transformers 5")  # of the same run: no source
    page = report.page()
    assert "| batch | context | value | unit | p99 | goal | peer | machine |" in page
    assert "| 256 | 1024 | 0.71 | ms | 1.2 | <= 1 |  | NVIDIA H200 |" in page
    assert "| one stream | 46 | tokens/s |  |  | transformers 5 |" in page


def test_the_picture_is_shown_where_it_is(benchmark: Load, report: ModuleType) -> None:
    recorder = record(benchmark)
    recorder.add("mixed", 9.0, "ms", p99=20.0, token_budget=512, figures={"ttft_p50": 300.5, "whole": True})
    assert "mixed.png" not in report.page()
    (report.PAGE.parent / "mixed.png").write_bytes(b"")
    page = report.page()
    assert "![mixed](mixed.png)" in page
    assert "| 512 | 300.5 | True | 9 | ms | 20 |" in page


def test_results_can_go_elsewhere(benchmark: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWOSTROKE_COMMIT", "feed123")
    benchmark("record").Recorder("gpu", tmp_path / "out.jsonl").add("start", 1.23456, "s")
    line = json.loads((tmp_path / "out.jsonl").read_text())
    assert (line["commit"], line["value"]) == ("feed123", 1.2346)
