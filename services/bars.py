"""Progress bars on a terminal, for what takes seconds: downloads, conversions, weights."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TypeAlias

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

Report: TypeAlias = Callable[[str, int, int], None]
"""Is told (stage, bytes done, bytes in all); in all 0 while unknown."""


@contextmanager
def progress_bars() -> Iterator[Report]:
    """Bars on stderr, one a stage."""
    columns = (TextColumn("{task.description:<10}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    bars = Progress(*columns, console=Console(stderr=True))
    tasks: dict[str, TaskID] = {}

    def report(stage: str, done: int, total: int) -> None:
        if not tasks:  # nothing is drawn where nothing is done
            bars.start()
        if stage not in tasks:
            tasks[stage] = bars.add_task(stage, total=None)
        bars.update(tasks[stage], completed=done, total=total or None)

    try:
        yield report
    finally:
        if tasks:
            bars.stop()


def bars_if(wanted: bool) -> AbstractContextManager[Report | None]:
    """The same where `wanted`; else nothing is told."""
    return progress_bars() if wanted else nullcontext()
