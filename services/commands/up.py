"""`twostroke up`: the whole stack on this machine."""

import json
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from .. import logs
from ..bars import progress_bars
from ..configure import load_up, warn_of_unknown_variables
from ..options import given_flags, settings_options
from ..settings import GatewaySettings, UpSettings, WorkerSettings


class JsonReport:
    """One JSON object a line on stdout."""

    def event(self, event: str, **details: object) -> None:
        """Flushes: somebody waits for `serving`."""
        print(json.dumps({"event": event, **details}), flush=True)


class ConsoleReport:
    """For people."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def event(self, event: str, **details: Any) -> None:
        """A line, or for `serving` the table of addresses."""
        name, pid = details.get("name"), details.get("pid")
        lines = {
            "started": f"{name}: starting (process {pid})",
            "ready": f"{name}: ready on {details.get('address')} after {details.get('after_s', 0):.1f} s",
            "exited": f"{name}: {_ending(details.get('code'))} (process {pid})",
            "hung": f"{name}: {details.get('reason')}, killed (process {pid})",
            "restarting": f"{name}: starting again"
            + (f" in {details.get('delay_s', 0):g} s" if details.get("delay_s") else ""),
            "gave_up": f"{name}: cannot be started; the lines above say why",
            "draining": "stopping: answers under way may finish; Ctrl-C again ends them",
            "killing": "stopping now",
            "stopped": "stopped",
        }
        if event == "serving":
            self._table(details["address"], details["processes"], details.get("http", ""), details.get("admin", ""))
        else:
            self._console.print(
                lines.get(event, event), style="red" if event in ("hung", "gave_up") else None, highlight=False
            )

    def _table(self, address: str, processes: list[dict[str, Any]], http: str, admin: str) -> None:
        table = Table("process", "pid", "address", title="twostroke serves", title_justify="left")
        for process in processes:
            table.add_row(process["name"], str(process["pid"]), process["address"])
        self._console.print(table)
        if http:
            self._console.print(f"OpenAI API: base URL {http}/v1", highlight=False)
        if admin not in ("", address):
            self._console.print(f"Orders to workers: twostroke workers list --address {admin}", highlight=False)
        where = "" if address == "127.0.0.1:50051" else f"--address {address} "
        self._console.print(
            f'Ask it something: twostroke generate {where}"Why is the sky blue?"    Stop: Ctrl-C', highlight=False
        )


def _ending(code: int | None) -> str:
    if code is None or code >= 0:
        return "ended" if code == 0 else f"ended with code {code}"
    import signal

    return f"killed by {signal.Signals(-code).name}"


@click.command(short_help="Run a whole stack on this machine.")
@settings_options(UpSettings, GatewaySettings, WorkerSettings, skip=("name", "workers", "advertise"))
@click.option("--json", "as_json", is_flag=True, help="Events as JSON lines on stdout.")
@click.pass_context
def up(context: click.Context, /, config: Path | None, as_json: bool, **options: Any) -> None:
    """Run a gateway, prefill workers and decode workers on this machine.

    Each is a process of its own; one that dies or hangs is started again. Ctrl-C lets running answers finish and stops
    everything; a second one stops at once.

    \b
    Examples:
      twostroke up
      twostroke up --prefill 1 --decode 2 --threads 1
      twostroke up --prefill 1 --decode 3 --devices cuda:0,cuda:1,cuda:2,cuda:3
      twostroke up --model ./my-model --config twostroke.toml

    Each option is also a variable (--decode: TWOSTROKE_DECODE) and a key of the file's [up], [gateway] or [worker]
    table.
    """
    settings, gateway, worker = load_up(given_flags(options), config)
    logs.setup(settings.log_level, "up")
    warn_of_unknown_variables()

    import asyncio

    from ...engine.model_files import PARTS, TEXT_ONLY
    from ...engine.models import resolve
    from ..supervisor.up import plan, run

    stack = plan(settings, gateway, worker)  # its errors before the download
    with progress_bars() as progress:  # here, once, and not in every process at the same time
        parts = TEXT_ONLY if worker.load_format == "dummy" else PARTS
        resolve(gateway.model, cache_dir=gateway.models_dir, progress=progress, parts=parts)
    report = JsonReport() if as_json else ConsoleReport(Console())
    context.exit(asyncio.run(run(stack, report)))
