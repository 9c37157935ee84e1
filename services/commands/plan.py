"""`twostroke plan`: what a worker's memory would go to."""

import json
from pathlib import Path
from typing import Any

import click

from ...engine.config import EngineOptions
from ...errors import ConfigError
from ..bars import progress_bars
from ..configure import load
from ..options import given_flags, settings_options
from ..settings import WorkerSettings, parse_bytes

ASKED = {
    *("models_dir", "device", "dtype", "page_size", "kv_memory", "gpu_memory", "max_batch", "max_input", "max_output"),
    *("token_budget", "batch_invariant", "cuda_graphs"),
}
_tokens = click.IntRange(1, 1 << 24)


@click.command(short_help="Show what a worker's memory would go to.")
@click.argument("model", default=None, required=False)
@click.option(
    "--device-memory", metavar="SIZE", default=None, help="The GPU's, such as 141GiB; else this machine's is asked."
)
@settings_options(WorkerSettings, skip=set(WorkerSettings.model_fields) - ASKED)
@click.option(
    "--input", "input_", type=_tokens, default=1024, show_default=True, help="Prompt tokens, to compare page sizes."
)
@click.option("--output", type=_tokens, default=256, show_default=True, help="Output tokens, to compare page sizes.")
@click.option("--json", "as_json", is_flag=True, help="As a JSON object.")
def plan(
    model: str | None,
    device_memory: str | None,
    config: Path | None,
    input_: int,
    output: int,
    as_json: bool,
    **options: Any,
) -> None:
    """Show what a worker's memory would go to, and how many sequences would fit, without loading any weights.

    MODEL: what a worker takes (a directory, a hub id, smollm2-135m), or a bare config.json. With --device-memory no GPU
    is needed.

    \b
    Examples:
      twostroke plan smollm2-135m
      twostroke plan meta-llama/Llama-3.1-8B --device-memory 141GiB --gpu-memory 0.9
      twostroke plan ./config.json --device-memory 80GiB --max-input 4096 --max-output 1024 --json
    """
    from ...engine.memory_plan import plan_memory
    from ...engine.models import read_config

    flags = {**given_flags(options), "role": "both"} | ({"model": model} if model is not None else {})
    if device_memory is not None:
        flags.setdefault("device", "cuda")
    settings = load(WorkerSettings, flags, config)
    engine = settings.engine_options()
    with progress_bars() as report:  # the embedded model may have to be made
        sizes = read_config(settings.model, cache_dir=settings.models_dir, progress=report)
    planned = plan_memory(sizes, engine, device_memory=_device_memory(device_memory, engine))
    pages = compare_pages(input_, output)
    if as_json:
        click.echo(json.dumps({"model": settings.model, **planned.to_dict(), "pages": pages}))
        return
    click.echo("\n".join(planned.lines()))
    lost = ", ".join(f"{share:.1%} at {size}" for size, share in pages["lost"].items())
    click.echo(
        f"pages of sequences with {input_:,} tokens in, {output:,} out: {lost} empty; {pages['suited']} would suit"
    )


def compare_pages(input_: int, output: int) -> dict[str, Any]:
    """The share of positions lost by page size, and the size that suits sequences of so many tokens in and out."""
    from ...engine.page_waste import PAGE_SIZES, lost_share, suited_page_size

    return {
        "input": input_,
        "output": output,
        "lost": {str(size): round(lost_share(size, input_, input_ + output), 6) for size in PAGE_SIZES},
        "suited": suited_page_size(input_ + output / 2),
    }


def _device_memory(given: str | None, options: EngineOptions) -> int:
    """Bytes; 0 where a CPU's are not known. ConfigError where nobody says how much a GPU has."""
    if given is not None:
        try:
            size = parse_bytes(given)
        except ValueError:
            size = 0
        if not isinstance(size, int) or size <= 0:
            raise ConfigError(f"device_memory: got {given!r}, takes a size such as 141GiB", field="device_memory")
        return size
    if options.device_type == "cpu":
        from ..supervisor.machine import memory_bytes

        return memory_bytes()[1]
    from ...engine.device import check_device, device_memory

    try:
        check_device(options.device)
    except ConfigError as error:
        message = f"device_memory: got nothing, and {error.message}; say how much it has: --device-memory 141GiB"
        raise ConfigError(message, field="device_memory") from error
    return device_memory(options.device)
