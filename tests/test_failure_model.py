"""docs/failure-model.md: every row names its test, and every test that it names is there."""

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs" / "failure-model.md").read_text(encoding="utf-8")
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


@cache
def functions_of(path: Path) -> frozenset[str]:
    """Names of the test functions in a file."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return frozenset(node.name for node in ast.parse(path.read_text("utf-8")).body if isinstance(node, kinds))


def rows() -> list[list[str]]:
    """Cells of every row below a heading."""
    lines = [line for line in TEXT.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [row for row in cells if row[0] != "what" and not row[0].startswith("---")]


def test_every_row_names_a_test_that_is_there() -> None:
    assert len(rows()) > 50
    for row in rows():
        assert len(row) == 5, row
        named = NAMED.findall(row[-1])
        assert named, f"no test: {row}"
        for path, name in named:
            assert name in functions_of(ROOT / path), f"{path} has no {name}"


def test_whoever_may_fail_has_rows() -> None:
    text = TEXT.lower()
    for who in ("prefill worker", "decode worker", "links", "gateway", "supervisor", "client", "memory and files"):
        assert re.search(rf"^## .*{who}", text, re.MULTILINE), who
    for what in ("killed", "frozen", "sigcont", "preemption", "cancels", "deadline"):
        assert any(what in row[0].lower() for row in rows()), what


def test_links() -> None:
    for target in re.findall(r"\]\(([\w./-]+)\)", TEXT):
        assert (ROOT / "docs" / target).is_file(), target
