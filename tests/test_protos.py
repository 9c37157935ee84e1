"""The generated modules are those of protos/, and everything in protos/ has a contract in words."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PROTOS = sorted((ROOT / "protos").rglob("*.proto"))
PACKAGES = ("v1", "oip", "smg")
NAMED = r"(?:service|message|enum|rpc|oneof)\s+\w+"
FIELD = r"(?:optional\s+|repeated\s+)?[\w.<>, ]+\s+\w+\s*=\s*\d+\s*(?:\[.*\])?;"
VALUE = r"[A-Z]\w*\s*=\s*\d+;"
DECLARATION = re.compile(rf"^\s*(?:{NAMED}|{FIELD}|{VALUE})")
GENERATED = re.compile(r"_pb2(_grpc)?\.pyi?$")


def modules(folder: Path) -> dict[str, bytes]:
    """The generated files below a folder, by package and name."""
    return {
        f"{package}/{path.name}": path.read_bytes()
        for package in PACKAGES
        for path in (folder / package).iterdir()
        if GENERATED.search(path.name)
    }


def test_generated_code_is_up_to_date(tmp_path: Path) -> None:
    pytest.importorskip("grpc_tools")
    subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "protos.py"), str(tmp_path)], check=True, capture_output=True
    )
    made = modules(tmp_path / "twostroke")
    committed = modules(ROOT / "src" / "twostroke")
    assert made.keys() == committed.keys()
    assert len(made) == 4 * len(PROTOS)
    for name, content in made.items():
        assert content == committed[name], f"{name} is stale: make protos"


@pytest.mark.parametrize("path", PROTOS, ids=lambda path: path.name)
def test_everything_is_documented(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    declared = 0
    for number, line in enumerate(lines):
        if DECLARATION.match(line) and not line.lstrip().startswith("//"):
            declared += 1
            above = lines[number - 1].strip()
            assert above.startswith("/// "), f"{path.name}:{number + 1} has no ///: {line.strip()}"
            assert len(above) > 6
    assert declared > 40


def test_the_search_for_declarations_finds_all_kinds() -> None:
    for line in (
        "service Worker {",
        "  rpc Session(stream ToWorker) returns (stream FromWorker);",
        "message Ticket {",
        "enum Role {",
        "  ROLE_BOTH = 3;",
        "  uint32 sample = 2;",
        "  repeated uint32 pages = 4;",
        "  optional Finish finish = 5;",
        "  map<string, uint32> counts = 1;",
        "  oneof kind {",
        "    Heartbeat heartbeat = 6;",
    ):
        assert DECLARATION.match(line), line
    for line in ('syntax = "proto3";', "package twostroke.v1;", "}", "", "  /// Rises by one = 1;"):
        assert not DECLARATION.match(line) or line.lstrip().startswith("//"), line
