"""`twostroke verify`: the engine beside transformers on the same weights."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from rich.table import Table

from ...errors import ConfigError
from .models import _models_dir, models_dir_option

if TYPE_CHECKING:
    from ...engine.verify import Progress as Report_
    from ...engine.verify import Report

MAX_PROMPTS = 1 << 20  # bytes of a file of prompts


@click.command()
@click.argument("model", default="smollm2-135m", metavar="[MODEL]")
@click.option("--against", metavar="MODEL", help="The original, for transformers to load  [default: MODEL]")
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16"]),
    default="float32",
    show_default=True,
    help="Of the engine; transformers computes in float32 on weights rounded to it.",
)
@click.option(
    "--prompts", type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="FILE", help="One a line."
)
@click.option("--tokens", type=click.IntRange(1, 1024), default=32, show_default=True, help="Greedy tokens a prompt.")
@models_dir_option
@click.option("--json", "as_json", is_flag=True, help="As one JSON object.")
@click.pass_context
def verify(
    context: click.Context,
    /,
    model: str,
    against: str | None,
    dtype: str,
    prompts: Path | None,
    tokens: int,
    models_dir: str | None,
    as_json: bool,
) -> None:
    """Compare the engine with transformers on MODEL.

    Each layer's output, the logits, greedy tokens, texts through the tokenizer; of the first layer that is off, the
    weights beside the original's. Exit code 1 when something is off. Needs transformers (pip install 'twostroke[dev]')
    and memory for two models.

    \b
    Example:
      twostroke verify smollm2-135m
      twostroke verify ./quantised --against ./original --dtype bfloat16
    """
    given = _read(prompts) if prompts else None

    from ...engine.models import resolve
    from ...engine.verify import PROMPTS
    from ...engine.verify import verify as compare

    folder = _models_dir(models_dir)
    path = resolve(model, cache_dir=folder)
    original = resolve(against, cache_dir=folder) if against else path
    with _progress() as progress:
        report = compare(
            path,
            original,
            dtype="bfloat16" if dtype == "bfloat16" else "float32",
            prompts=given or PROMPTS,
            tokens=tokens,
            progress=progress,
        )
    if as_json:
        click.echo(json.dumps(report.as_dict(), ensure_ascii=False))
    else:
        _show(report, Console())
    context.exit(0 if report.ok else 1)


def _read(prompts: Path) -> list[str]:
    if prompts.stat().st_size > MAX_PROMPTS:
        raise ConfigError(f"prompts: {prompts} is larger than {MAX_PROMPTS} bytes", field="prompts")
    try:
        lines = [line for line in prompts.read_text(encoding="utf-8").splitlines() if line]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"prompts: {prompts} cannot be read: {error}", field="prompts") from error
    if not lines:
        raise ConfigError(f"prompts: {prompts} has no line", field="prompts")
    return lines


@contextmanager
def _progress() -> Iterator["Report_"]:
    """A bar a stage, on stderr."""
    columns = (TextColumn("{task.description:<14}"), BarColumn(), MofNCompleteColumn())
    tasks: dict[str, TaskID] = {}
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:

        def report(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bars.add_task(stage, total=total)
            bars.update(tasks[stage], completed=done)

        yield report


def _verdict(ok: bool) -> str:
    return "[green]ok[/green]" if ok else "[red]off[/red]"


def _show(report: "Report", console: Console) -> None:
    table = Table("", "largest error", "relative", "", title=f"against transformers, {report.dtype}")
    for layer in report.layers:
        table.add_row(layer.name, f"{layer.largest:.2e}", f"{layer.relative:.2e}", _verdict(layer.ok))
    console.print(table)
    _show_tokens(report, console)
    if report.failing:
        _show_weights(report, console)
    console.print("[green]all within tolerance[/green]" if report.ok else f"[red]off[/red]: {_what(report)}")


def _what(report: "Report") -> str:
    parts = [f"{report.failing} first"] if report.failing else []
    parts += ["greedy tokens"] if not all(check.ok for check in report.greedy) else []
    parts += [f"tokenizer ({text.name})" for text in report.texts if not text.ok]
    return ", ".join(parts)


def _show_tokens(report: "Report", console: Console) -> None:
    table = Table("prompt", "greedy tokens that agree", "first that does not", "worst, in std of logits", "")
    for check in report.greedy:
        first = "" if check.first_off is None else str(check.first_off)
        agreed = f"{check.agreed} of {check.tokens}"
        table.add_row(f"{check.prompt_tokens} tokens", agreed, first, f"{check.regret:.2e}", _verdict(check.ok))
    console.print(table)
    table = Table("text", "tokens", "comes back", "difference from transformers' tokenizer", "")
    for text in report.texts:
        back = "exactly" if text.lossless else "normalised"
        table.add_row(text.name, str(text.tokens), back, escape(text.difference), _verdict(text.ok))
    console.print(table)


def _show_weights(report: "Report", console: Console) -> None:
    table = Table("tensor", "", "min", "max", "mean", "std", "absmax", title=f"weights of {report.failing}")
    notes = []
    for check in report.weights:
        name = check.name.removesuffix(".weight").partition("layers.")[2] or check.name
        short = name.rpartition(".")[2] if not name.endswith(".bias") else name.split(".", 2)[-1]
        for whose, figures in (("here", check.ours), ("original", check.original)):
            values = (figures.minimum, figures.maximum, figures.mean, figures.std, figures.absmax) if figures else ()
            table.add_row(short if whose == "here" else "", whose, *(f"{value:.3g}" for value in values))
        if check.original is None:
            notes.append(f"{check.name}: the original has none")
        elif check.reordered:
            notes.append(f"{check.name}: the original's values in another order")
        elif not check.ok:
            notes.append(f"{check.name} differs from the original by up to {check.difference:.3g}")
    console.print(table)
    for note in notes or ["all its weights equal the original's: it is the computation that differs"]:
        console.print(note, soft_wrap=True)
