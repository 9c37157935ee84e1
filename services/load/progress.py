"""The progress bar of a load, on stderr, where that is a terminal."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

from .run import LoadRun, Options


class _Counts(ProgressColumn):
    """What is so far; drawn by the bar's own thread, which only reads."""

    def __init__(self, run: LoadRun) -> None:
        super().__init__()
        self._run = run

    def render(self, task: Task) -> Text:
        """Done, failed, running, tokens."""
        run, tally = self._run, self._run.tally
        text = Text(f"{tally.succeeded} done, {run.running} running, {tally.output_tokens} tokens", style="dim")
        return text.append(f", {tally.failed} failed", style="red") if tally.failed else text


class LoadProgress:
    """Shows warm-up, then how much of the requests or of the time is over."""

    def __init__(self, bars: Progress, run: LoadRun, options: Options) -> None:
        self._bars, self._run, self._options = bars, run, options
        self._task: TaskID = bars.add_task("warm-up", total=None)

    def measuring(self) -> None:
        """The run itself begins."""
        total = self._options.requests if self._options.duration_s is None else self._options.duration_s
        self._bars.reset(self._task, description="load", total=total)

    def update(self) -> None:
        """A request of the run has ended."""
        ended = self._run.tally.succeeded + self._run.tally.failed
        duration, requests = self._options.duration_s, self._options.requests
        done = float(ended) if duration is None else min(duration, time.monotonic() - self._run.started)
        if duration is not None and requests is not None:  # whichever comes first
            done = max(done, duration * ended / requests)
        self._bars.update(self._task, completed=done)


@contextmanager
def progress(run: LoadRun, options: Options, label: str) -> Iterator[LoadProgress]:
    """A bar while the block runs; it leaves nothing behind."""
    console = Console(stderr=True)
    columns = (TextColumn(label), TextColumn("{task.description:<7}"), BarColumn(), TimeElapsedColumn(), _Counts(run))
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        yield LoadProgress(bars, run, options)
