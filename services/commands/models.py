"""`twostroke models pull|list` and `twostroke convert`."""

import json
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from ..bars import progress_bars
from ..configure import load
from ..settings import Settings

models_dir_option = click.option(
    "--models-dir", metavar="PATH", help="Folder of the models  [default: $TWOSTROKE_MODELS_DIR]"
)


def _models_dir(given: str | None) -> Path | None:
    return load(Settings, {"models_dir": given} if given else {}).models_dir


@click.group()
def models() -> None:
    """Fetch and list models.

    \b
    Examples:
      twostroke models pull
      twostroke models pull HuggingFaceTB/SmolLM2-360M-Instruct
      twostroke models list
    """


@models.command(short_help="Fetch a model, and convert it where needed.")
@click.argument("name", default="smollm2-135m", metavar="[NAME]")
@models_dir_option
def pull(name: str, models_dir: str | None) -> None:
    """Fetch NAME (default: smollm2-135m, the embedded default) and convert it where needed.

    \b
    Example:
      twostroke models pull HuggingFaceTB/SmolLM2-360M-Instruct@main
    """
    from ...engine.models import resolve

    with progress_bars() as report:
        path = resolve(name, cache_dir=_models_dir(models_dir), progress=report)
    click.echo(path)


@models.command(name="list")
@models_dir_option
@click.option("--json", "as_json", is_flag=True, help="As a JSON list.")
def list_models(models_dir: str | None, as_json: bool) -> None:
    """List the models that are here.

    \b
    Example:
      twostroke models list --json
    """
    from ...engine.models import cached

    found = cached(_models_dir(models_dir))
    if as_json:
        click.echo(json.dumps([{"name": m.name, "path": str(m.path), "bytes": m.nbytes} for m in found]))
    elif not found:
        click.echo("none yet; fetch the default one: twostroke models pull")
    else:
        table = Table("name", "MB", "path")
        for model in found:
            table.add_row(model.name, f"{model.nbytes / 1e6:.0f}", str(model.path))
        Console().print(table)


@click.command(short_help="Turn a GGUF file into a model directory.")
@click.argument("gguf", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("directory", type=click.Path(file_okay=False, path_type=Path))
@click.option(
    "--dtype", type=click.Choice(["bfloat16", "float32"]), default="bfloat16", show_default=True, help="Of the weights."
)
def convert(gguf: Path, directory: Path, dtype: str) -> None:
    """Turn the file GGUF into DIRECTORY: safetensors, configuration and tokenizer.

    \b
    Example:
      twostroke convert SmolLM2-135M-Instruct.Q4_1.gguf ./smollm2
      twostroke up --model ./smollm2
    """
    from ...engine.gguf_convert import convert as convert_gguf

    with progress_bars() as report:
        convert_gguf(gguf, directory, "float32" if dtype == "float32" else "bfloat16", report)
    click.echo(directory)
