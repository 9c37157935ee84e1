"""`twostroke bench`: puts a load on a gateway and measures what its clients see."""

import asyncio
import re
import secrets
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import click
from rich.console import Console

from ...errors import ConfigError
from ..access_options import access
from ..options import gateway_option, priority_option

if TYPE_CHECKING:
    from ..load.bench import BenchPlan

_LINES = click.Path(path_type=Path, dir_okay=False, allow_dash=True)
_SECONDS = click.FloatRange(0.001, 1e7)


@click.command(short_help="Load a running gateway and measure.")
@gateway_option
@click.option("--model", default="", metavar="NAME", help="Served name  [default: whatever it serves]")
@click.option("--concurrency", type=click.IntRange(1, 65536), metavar="N", help="Requests at once  [default: 4]")
@click.option(
    "--rate",
    type=click.FloatRange(0.0001, 1e6),
    metavar="R",
    help="Instead: R requests a second (Poisson), whatever the answers do.",
)
@click.option("--sweep", metavar="N,N,...", help="Instead: a run for each of these concurrencies.")
@click.option(
    "--requests",
    type=click.IntRange(1),
    metavar="N",
    help="Requests of a run  [default: 32, or 4 x concurrency if that is more]",
)
@click.option("--duration", type=_SECONDS, metavar="S", help="Send for so long; what runs then may finish.")
@click.option(
    "--input",
    "input_",
    default="512",
    show_default=True,
    metavar="LENGTH",
    help="Prompt tokens: N, N-N, lognormal:MEAN:SIGMA.",
)
@click.option("--output", default="128", show_default=True, metavar="LENGTH", help="Output tokens: the same.")
@click.option(
    "--shared-prefix", metavar="N:GROUPS", help="In front of each prompt, one of GROUPS prefixes of N tokens."
)
@click.option(
    "--warmup",
    type=click.IntRange(0, 65536),
    default=2,
    show_default=True,
    metavar="N",
    help="Requests before it, not counted.",
)
@click.option("--seed", type=click.IntRange(0, 2**63 - 1), metavar="N", help="Same seed, same load  [default: drawn]")
@click.option(
    "--temperature", type=click.FloatRange(0, 100), default=0.0, show_default=True, metavar="X", help="0 is greedy."
)
@click.option("--ignore-eos/--respect-eos", default=True, help="Go on past the model's own end (the default).")
@priority_option
@click.option("--timeout", type=_SECONDS, default=600.0, show_default=True, metavar="S", help="Of a request.")
@click.option(
    "--channels", type=click.IntRange(1, 256), default=1, show_default=True, metavar="N", help="Connections to use."
)
@click.option(
    "--max-in-flight",
    type=click.IntRange(1, 1 << 20),
    default=8192,
    show_default=True,
    metavar="N",
    help="With --rate: arrivals beyond fail as NOT_SENT.",
)
@click.option("--json", "json_file", type=_LINES, metavar="FILE", help="Append a JSON line a run; - is stdout.")
@click.option("--per-request", type=_LINES, metavar="FILE", help="Write a JSON line a request; - is stdout.")
@click.option("--label", multiple=True, metavar="KEY=VALUE", help="For the JSON line, such as gpu=H200; repeatable.")
@click.option("--plot", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE", help="Draw the sweep.")
@click.pass_context
def bench(context: click.Context, /, **options: Any) -> None:
    """Put a load on a running gateway and measure what its clients see.

    Prompts are random tokens. Ctrl-C ends the run early and shows what was seen. Exit code 1 when no request succeeded.

    \b
    Examples:
      twostroke bench --concurrency 8 --input 100-2000 --output 128
      twostroke bench --rate 4 --duration 60 --shared-prefix 256:10 --json results.jsonl
      twostroke bench --sweep 1,2,4,8,16 --plot curve.png

    docs/benchmarking.md says what each figure means.
    """
    plan = make_plan(options)

    import uvloop

    from ..load.bench import Bench

    tables_to_stderr = any(str(options[name]) == "-" for name in ("json_file", "per_request"))
    with (
        opened(options["json_file"], "json", "a") as json_file,
        opened(options["per_request"], "per_request", "w") as per_request,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        try:
            work = Bench(plan, Console(stderr=tables_to_stderr), json_file, per_request)
            context.exit(runner.run(work.run()))
        except KeyboardInterrupt:  # the second one
            context.exit(130)


def make_plan(options: dict[str, Any]) -> "BenchPlan":
    """Checks the options together, before anything is sent; ConfigError."""
    from ..load.bench import BenchPlan
    from ..load.lengths import parse_lengths
    from ..load.plan import LoadSpec
    from ..load.plot import check_plotting
    from ..load.run import Options

    modes = [name for name in ("concurrency", "rate", "sweep") if options[name] is not None]
    if len(modes) > 1:
        raise ConfigError(f"{modes[1]}: got it beside {modes[0]}, takes only one of them", field=modes[1])
    sweep = parse_sweep(options["sweep"]) if options["sweep"] is not None else None
    if options["plot"] is not None:
        if sweep is None:
            raise ConfigError("plot: got a file without --sweep, takes one with it", field="plot")
        check_plotting()
    prefix = parse_prefix(options["shared_prefix"]) if options["shared_prefix"] is not None else (0, 1)
    seed = secrets.randbits(32) if options["seed"] is None else options["seed"]
    return BenchPlan(
        address=options["address"],
        access=access(),
        spec=LoadSpec(
            parse_lengths(options["input_"], "input"), parse_lengths(options["output"], "output"), *prefix, seed
        ),
        options=Options(
            model=options["model"],
            temperature=options["temperature"],
            ignore_eos=options["ignore_eos"],
            priority=options["priority"],
            timeout_s=options["timeout"],
            requests=options["requests"],
            duration_s=options["duration"],
            max_in_flight=options["max_in_flight"],
        ),
        concurrencies=sweep or (options["concurrency"] or 4,),
        rate=options["rate"],
        sweep=sweep is not None,
        warm_up=options["warmup"],
        channels=options["channels"],
        labels=parse_labels(options["label"]),
        plot=options["plot"],
    )


def parse_sweep(text: str) -> tuple[int, ...]:
    """`1,2,4`, rising or not."""
    parts = text.split(",")
    if not all(re.fullmatch(r"[0-9]{1,5}", part) and 1 <= int(part) <= 65536 for part in parts) or len(parts) > 100:
        raise ConfigError(f"sweep: got {text!r}, takes whole numbers from 1 to 65536 such as 1,2,4,8", field="sweep")
    return tuple(int(part) for part in parts)


def parse_prefix(text: str) -> tuple[int, int]:
    """(tokens, groups) of `256:10`."""
    match = re.fullmatch(r"([0-9]{1,8}):([0-9]{1,8})", text)
    if match is None or not int(match[1]) or not int(match[2]):
        message = f"shared_prefix: got {text!r}, takes TOKENS:GROUPS, both at least 1, such as 256:10"
        raise ConfigError(message, field="shared_prefix")
    return int(match[1]), int(match[2])


def parse_labels(pairs: tuple[str, ...]) -> dict[str, str]:
    """`key=value` each."""
    labels: dict[str, str] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not re.fullmatch(r"[a-z][a-z0-9_]*", key):
            raise ConfigError(f"label: got {pair!r}, takes KEY=VALUE, the key of a-z, 0-9 and _", field="label")
        labels[key] = value
    return labels


@contextmanager
def opened(path: Path | None, option: str, mode: str) -> Iterator[IO[str] | None]:
    """The file, stdout for `-`; ConfigError where it cannot be opened, before the load is run."""
    if path is None or str(path) == "-":
        yield None if path is None else sys.stdout
        return
    try:
        file = path.open(mode, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{option}: cannot write {path}: {error.strerror}", field=option) from error
    with file:
        yield file
