"""Log lines: who, when, one line each."""

import io
import logging
import re
from collections.abc import Iterator

import pytest

from twostroke.services import logs


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    root, ours = logging.getLogger(), logging.getLogger("twostroke")
    before = list(root.handlers), root.level, ours.level
    yield io.StringIO()
    logging.captureWarnings(False)
    root.handlers[:] = before[0]
    root.setLevel(before[1])
    ours.setLevel(before[2])


def test_a_line(stream: io.StringIO) -> None:
    logs.setup("info", "decode-0", stream)
    logging.getLogger("twostroke.services.worker.worker").info("%d pages", 7)
    pattern = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z INFO decode-0 twostroke\.services\.worker\.worker: 7 pages\n"
    assert re.fullmatch(pattern, stream.getvalue())


def test_levels(stream: io.StringIO) -> None:
    logs.setup("warning", "x", stream)
    logging.getLogger("twostroke.a").info("no")
    logging.getLogger("library").info("no")
    logging.getLogger("twostroke.a").warning("ours")
    logging.getLogger("library").warning("theirs")
    assert [line.rsplit(": ")[-1] for line in stream.getvalue().splitlines()] == ["ours", "theirs"]


def test_a_message_cannot_forge_a_line(stream: io.StringIO) -> None:
    logs.setup("debug", "x", stream)
    logging.getLogger("twostroke").debug("a\n2026-01-01 INFO b\r\n")
    assert stream.getvalue().count("\n") == 1
    assert "a\\n2026" in stream.getvalue()


def test_an_exception_keeps_its_traceback(stream: io.StringIO) -> None:
    logs.setup("info", "x", stream)
    try:
        raise RuntimeError("boom")
    except RuntimeError:
        logging.getLogger("twostroke").exception("it failed")
    assert stream.getvalue().splitlines()[1] == "Traceback (most recent call last):"


def test_a_second_setup_replaces_the_first(stream: io.StringIO) -> None:
    logs.setup("info", "old", stream)
    logs.setup("error", "new", stream)
    logging.getLogger("twostroke").warning("no")
    logging.getLogger("twostroke").error("yes")
    assert len(stream.getvalue().splitlines()) == 1
    assert " new " in stream.getvalue()
