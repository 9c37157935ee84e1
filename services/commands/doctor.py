"""`twostroke doctor`: what this machine has and lacks."""

import json
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from ..configure import load
from ..settings import GatewaySettings, WorkerSettings


@click.command(short_help="Look at what this machine has and lacks.")
@click.option(
    "--config",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="TOML file with settings  [default: $TWOSTROKE_CONFIG]",
)
@click.option("--json", "as_json", is_flag=True, help="As a JSON list.")
@click.pass_context
def doctor(context: click.Context, /, config: Path | None, as_json: bool) -> None:
    """Look at this machine: what it has for twostroke, what it lacks, and what to do about it.

    Exit code 1 when something is missing without which nothing works.

    \b
    Example:
      twostroke doctor
    """
    from ..doctor import examine

    gateway = load(GatewaySettings, {}, config)
    worker = load(WorkerSettings, {"role": "both"}, config)
    findings = examine(listen=gateway.listen, models_dir=gateway.models_dir, shm_dir=worker.shm_dir)
    if as_json:
        click.echo(json.dumps([finding.as_dict() for finding in findings]))
    else:
        colours = {"ok": "green", "warning": "yellow", "missing": "red"}
        table = Table("", "", "", "remedy", show_header=False, box=None)
        for finding in findings:
            colour = colours[finding.verdict]
            table.add_row(finding.name, f"[{colour}]{finding.verdict}[/{colour}]", finding.value, finding.remedy)
        Console().print(table)
    context.exit(1 if any(finding.verdict == "missing" for finding in findings) else 0)
