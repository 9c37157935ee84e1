"""Log lines of a process: one a line, to stderr, through plain `logging`."""

import logging
import sys
import time
from typing import TextIO


class _Format(logging.Formatter):
    """`2026-11-29T18:47:03.123Z INFO decode-0 twostroke.services.worker.worker: text`; exceptions keep tracebacks."""

    @staticmethod
    def converter(seconds: float | None) -> time.struct_time:
        """Log lines of several machines are read side by side: UTC."""
        return time.gmtime(seconds)

    def __init__(self, name: str) -> None:
        super().__init__(
            fmt=f"%(asctime)s.%(msecs)03dZ %(levelname)s {name} %(name)s: %(message)s", datefmt="%Y-%m-%dT%H:%M:%S"
        )

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        """A message never spans lines: what a client sent must not be able to forge one."""
        return super().formatMessage(record).replace("\r", "\\r").replace("\n", "\\n")


def setup(level: str, name: str, stream: TextIO | None = None) -> None:
    """Sends every log line of this process from `level` (debug, info, warning, error) up to `stream` (stderr).

    `name`: who speaks, e.g. `decode-0`: several processes share a terminal. A second call replaces the first.
    """
    handler = logging.StreamHandler(stream if stream is not None else sys.stderr)
    handler.setFormatter(_Format(name))
    root = logging.getLogger()
    for old in list(root.handlers):
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(logging.WARNING)  # libraries speak only when something is wrong
    logging.getLogger("twostroke").setLevel(level.upper())
    logging.captureWarnings(True)
