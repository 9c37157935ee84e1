"""Result files: one JSON object a line. A later line of the same key supersedes an earlier one; nothing is edited."""

import datetime
import importlib.metadata
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"


def _commit() -> str:
    """Of the checkout; the environment names it where a copy without history runs."""
    if named := os.environ.get("TWOSTROKE_COMMIT"):
        return named
    run = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=RESULTS.parent, capture_output=True, text=True)
    return run.stdout.strip() or "unknown"


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return "unknown"


def _triton() -> str | None:
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return None


def place(*devices: str) -> str:
    """Where the two sides of a transfer are."""
    return "one GPU" if len(set(map(torch.device, devices))) == 1 else "two GPUs"


class Recorder:
    """Appends lines to `results/<name>.jsonl`, stamped with the machine, the versions and the command."""

    def __init__(self, name: str, path: Path | None = None) -> None:
        """`name`: of the result file, without ending. `path`: another file instead."""
        RESULTS.mkdir(exist_ok=True)
        self._path = path or RESULTS / f"{name}.jsonl"
        gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
        self._stamp: dict[str, Any] = {
            **({"gpu": gpu} if gpu else {"cpu": _cpu()}),
            "torch": torch.__version__,
            "triton": _triton(),
            "commit": _commit(),
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "command": shlex.join(["python", *sys.argv]),
        }

    def add(
        self, bench: str, value: float, unit: str, *, p99: float | None = None, peer: str | None = None, **point: Any
    ) -> None:
        """A figure, a median unless the point says otherwise; `peer` names another system measured in the same run."""
        line = {
            "bench": bench,
            **point,
            "value": round(value, 4),
            "unit": unit,
            "p99": p99,
            "peer": peer,
            **self._stamp,
        }
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")


def load() -> list[dict[str, Any]]:
    """All lines of all result files that no later line supersedes, in order of date."""
    stamp = {"value", "unit", "p99", "figures", "torch", "triton", "commit", "date", "command"}
    lines = [json.loads(text) for path in sorted(RESULTS.glob("*.jsonl")) for text in path.read_text().splitlines()]
    latest: dict[str, dict[str, Any]] = {}
    for line in sorted(lines, key=lambda line: str(line["date"])):
        latest[json.dumps({k: v for k, v in line.items() if k not in stamp}, sort_keys=True)] = line
    return list(latest.values())
