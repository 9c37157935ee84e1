"""Tables and result lines of known tallies."""

import importlib.util
import json
import re
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from twostroke.errors import ConfigError
from twostroke.services.load.plot import check_plotting, plot_sweep
from twostroke.services.load.record import OK, Record
from twostroke.services.load.report import (
    Result,
    headline,
    machine_stamp,
    ms,
    result_line,
    sweep_table,
    table,
)
from twostroke.services.load.tally import Tally
from twostroke.v1 import inference_pb2 as pb

ROOT = Path(__file__).parent.parent.parent.parent


def tally(count: int = 10, *, planned: bool = False, failures: int = 0) -> Tally:
    """Request i: sent at i, token 0 after 0.1 * (i + 1) s, then 0.2 s, then 0.05 s."""
    made = Tally()
    for i in range(count):
        record = Record(i, scheduled=i - 0.001 if planned else None, sent=float(i))
        made.sending(record)
        for index, at in enumerate((0.1 * (i + 1), 0.1 * (i + 1) + 0.2, 0.1 * (i + 1) + 0.25)):
            record.take(pb.GenerateResponse(first_index=index, token_ids=[7]), i + at)
        record.finish = pb.Finish(usage=pb.Usage(prompt_tokens=40, cached_tokens=10, output_tokens=3))
        record.end(OK, i + 0.1 * (i + 1) + 0.3)
        made.add(record)
    for i in range(failures):
        record = Record(count + i, sent=1.0)
        made.sending(record)
        record.end("UNAVAILABLE", 2.0, "nobody")
        made.add(record)
    return made


def text(renderable: Any, width: int = 200) -> str:
    out = StringIO()
    Console(file=out, width=width).print(renderable)
    return out.getvalue()


def test_numbers_for_people() -> None:
    assert [ms(x) for x in (None, 0.0, 0.00123, 0.0456, 0.09951, 0.1234, 12.3456)] == [
        "-", "0.00", "1.23", "45.6", "100", "123", "12346",
    ]  # fmt: skip


def test_the_headline() -> None:
    assert headline(tally()) == [
        "10 of 10 requests succeeded in 10.3 s: 0.97 requests/s, 39 tokens/s in, 2.9 tokens/s out, "
        "25% of the prompts cached"
    ]
    made = tally(2, failures=2)
    made.complete, made.cancelled, made.cut = False, 3, 1
    lines = headline(made)
    assert lines[0].startswith("2 of 4 requests succeeded")
    assert lines[1] == "UNAVAILABLE: 2 (50.0%), the first one: nobody"
    assert "1 requests had lengths" in lines[2]
    assert lines[3].startswith("INCOMPLETE: ended early, 3 requests")
    late = tally(2)
    late.lateness.add(0.5)
    assert "this client was late (p99 500 ms)" in headline(late)[-1]
    assert headline(Tally())[0].startswith("0 of 0 requests succeeded in 0.0 s")


def test_the_table() -> None:
    rows = {line.split("│")[1].strip(): line for line in text(table(tally())).splitlines() if line.startswith("│")}
    cells = [cell.strip() for cell in rows["time to first token"].split("│")[2:-1]]
    assert cells == ["550", "910", "991", "550", "1000", "10"]
    assert [cell.strip() for cell in rows["gap01: token 0 to 1"].split("│")[2:-1]] == ["200"] * 5 + ["10"]
    assert [cell.strip() for cell in rows["ITL: later gaps"].split("│")[2:-1]] == ["50.0"] * 5 + ["10"]
    assert "sent later than planned" not in rows
    assert "sent later than planned" in text(table(tally(planned=True)))
    empty = text(table(Tally()))
    assert re.search(r"end to end\s+│\s+-", empty)


def test_the_sweep_table() -> None:
    cut = tally(2, failures=1)
    cut.complete = False
    shown = text(sweep_table([Result({"concurrency": 1}, tally(4)), Result({"concurrency": 8}, cut)]))
    rows = [line.split() for line in shown.splitlines() if re.match(r" +\d", line)]
    assert [row[:3] for row in rows] == [["1", "4", "0"], ["8*", "2", "1"]]
    assert rows[0][3:] == ["1.08", "3.2", "25%", "250/397", "200/200", "50.0/50.0"]
    wide = tally(4)
    wide.ttft.add(99.9)
    lines = text(sweep_table([Result({"concurrency": 65536}, wide)]), width=80).splitlines()
    assert "…" not in "".join(lines)


def test_result_lines() -> None:
    result = Result({"mode": "open", "rate": 4.0, "input": "512", "seed": 3}, tally(planned=True, failures=5))
    line = result_line(result, {"cpu": "abacus", "commit": "abc"})
    assert json.loads(json.dumps(line)) == line
    assert {key: line[key] for key in ("bench", "mode", "rate", "input", "seed", "unit", "peer", "cpu")} == {
        "bench": "load", "mode": "open", "rate": 4.0, "input": "512", "seed": 3, "unit": "ms", "peer": None,
        "cpu": "abacus",
    }  # fmt: skip
    assert (line["value"], line["p99"]) == (550.0, 991.0)
    figures = line["figures"]
    assert (figures["ttft_p50"], figures["ttft_p99"], figures["gap01_p90"], figures["itl_p99"]) == (550, 991, 200, 50)
    assert (figures["requests"], figures["errors"], figures["error_rate"]) == (10, {"UNAVAILABLE": 5}, 0.3333)
    assert (figures["cached_share"], figures["complete"], figures["lateness_p50"]) == (0.25, True, 1.0)
    assert figures["output_tokens_s"] == round(30 / 10.3, 4)
    empty = result_line(Result({}, Tally()), {})
    assert (empty["value"], empty["p99"], empty["figures"]["e2e_p50"]) == (None, None, None)
    assert "NaN" not in json.dumps(empty)


def test_the_stamp_has_the_keys_of_result_files() -> None:
    stamp = machine_stamp({})
    assert set(stamp) == {"cpu", "torch", "triton", "commit", "date", "command"}
    assert stamp["torch"]
    assert re.fullmatch(r"[0-9a-f]{7,}|unknown", stamp["commit"])
    assert "cpu" not in machine_stamp({"gpu": "H200"})


def test_a_later_line_supersedes_one_of_the_same_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.util.spec_from_file_location("record", ROOT / "benchmarks" / "record.py")
    assert spec is not None
    assert spec.loader is not None
    record = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(record)
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    points = [
        ({"rate": 1}, tally(3), "2026-01-01"),
        ({"rate": 1}, tally(5), "2026-01-02"),
        ({"rate": 2}, tally(2), "2026-01-03"),
    ]
    lines = [result_line(Result(point, made), {"date": date, "cpu": "x"}) for point, made, date in points]
    (tmp_path / "load.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert record.load() == lines[1:]


def test_plotting_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"needs matplotlib.*pip install 'twostroke\[bench\]'"):
        check_plotting()


def test_the_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    results = [Result({"concurrency": n}, tally(n)) for n in (1, 2, 4)] + [Result({"concurrency": 8}, Tally())]
    plot_sweep(results, tmp_path / "curve.png", "tiny")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ConfigError, match="plot: cannot write"):
        plot_sweep(results, tmp_path / "no" / "curve.png", "tiny")
    with pytest.raises(ConfigError, match="plot: cannot write"):
        plot_sweep(results, tmp_path / "curve.nonsense", "tiny")
