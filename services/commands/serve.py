"""`twostroke gateway`, `prefill`, `decode`, `both` and `health`: one process each."""

import os
import sys
from pathlib import Path
from typing import Any

import click

from ...errors import ConfigError
from .. import logs
from ..access_options import access, access_options
from ..configure import flags_of, load, setting_variables, warn_of_unknown_variables
from ..describe import takes
from ..options import address_argument, given_flags, settings_options
from ..settings import GatewaySettings, WorkerSettings, split_address
from ..supervisor.parent import die_with

parent_option = click.option("--parent", type=int, hidden=True, help="Supervisor's process id; die with it.")
bars_option = click.option("--bars", is_flag=True, hidden=True, help="Nobody else writes to this terminal.")

SWITCH_S = 0.0002
"""After which a worker's busy thread lets another one run: what its engine tells a peer or a client must not wait for
the five milliseconds of Python's default until the loop sends it."""

WORKER_HELP = """
{what}

\b
Example:
  twostroke {role} --listen 127.0.0.1:{port} --model smollm2-135m
  twostroke gateway --workers 127.0.0.1:6001,127.0.0.1:6002

Each option is also a variable (--max-batch: TWOSTROKE_MAX_BATCH) and a key of the file's [worker] table (max_batch).
SIGTERM drains: what runs goes on for up to --drain-s, nothing new is taken.
"""


@click.command()
@settings_options(GatewaySettings)
@parent_option
@click.option("--share", hidden=True, help="What this one of several processes has in common with the others.")
@click.option("--watch", default="", hidden=True, help="Where a supervisor asks how all processes are, host:port.")
def gateway(config: Path | None, parent: int | None, share: str | None, watch: str, **options: Any) -> None:
    """Serve the public API in front of workers.

    \b
    Example (workers first, each in its own terminal):
      twostroke prefill --listen 127.0.0.1:6001
      twostroke decode --listen 127.0.0.1:6002
      twostroke gateway --workers 127.0.0.1:6001,127.0.0.1:6002

    Each option is also a variable (--max-queue: TWOSTROKE_MAX_QUEUE) and a key of the file's [gateway] table
    (max_queue). SIGTERM drains: what runs goes on for up to --drain-s, nothing new is taken.
    """
    if parent is not None:
        die_with(parent)
    settings = load(GatewaySettings, given_flags(options), config)
    if not settings.workers:
        wanted = takes(GatewaySettings.model_fields["workers"])
        raise ConfigError(f"workers: got nothing, takes {wanted} (or let `twostroke up` start them)", field="workers")
    settings = settings.model_copy(update={"name": settings.name or f"gateway-{os.getpid()}"})
    _start_log(settings)
    if settings.processes > 1 and share is None:
        sys.exit(_serve_all(settings, watch))

    import uvloop

    from ..gateway.gateway import serve
    from ..gateway.processes.share import Share

    uvloop.run(serve(settings, Share.read(share) if share is not None else None))


def _serve_all(settings: GatewaySettings, watch: str) -> int:
    """Gateways in processes of their own."""
    import asyncio

    from ...engine.model_files import TEXT_ONLY
    from ...engine.models import resolve
    from ..gateway.processes.parent import serve_all

    resolve(settings.model, cache_dir=settings.models_dir, parts=TEXT_ONLY)  # here, once, and not in each of them
    return asyncio.run(serve_all(settings, watch))


def _worker(role: str, config: Path | None, parent: int | None, bars: bool, options: dict[str, Any]) -> None:
    if parent is not None:
        die_with(parent)
    settings = load(WorkerSettings, {**given_flags(options), "role": role}, config)
    settings = settings.model_copy(update={"name": settings.name or f"{role}-{os.getpid()}"})
    if parent is None:
        sys.exit(_launch(settings))
    _start_log(settings)

    import uvloop

    from ..worker.role_change import EXIT_CODES
    from ..worker.worker import serve

    sys.setswitchinterval(SWITCH_S)
    next_role = uvloop.run(serve(settings, bars=bars))
    if next_role is not None:
        sys.exit(EXIT_CODES[next_role])


def _launch(settings: WorkerSettings) -> int:
    """The worker in a process of its own, which another one follows when it changes its role."""
    from ..supervisor.launcher import Launcher
    from ..supervisor.machine import free_ports

    host, port = split_address(settings.listen)
    if port == 0:  # drawn here: those who follow listen where the first one did
        settings = settings.model_copy(update={"listen": f"{host}:{free_ports(1)[0]}"})
    warn_of_unknown_variables()
    environment = {key: value for key, value in os.environ.items() if key.upper() not in setting_variables()}
    bars = ["--bars"] if sys.stderr.isatty() else []
    return Launcher(settings.role, [*flags_of(settings), *bars], environment).run()


def _start_log(settings: GatewaySettings | WorkerSettings) -> None:
    logs.setup(settings.log_level, settings.name)
    warn_of_unknown_variables()


@click.command(
    help=WORKER_HELP.format(role="prefill", port=6001, what="Compute prompts and push their KV to decoders.")
)
@settings_options(WorkerSettings)
@parent_option
@bars_option
def prefill(config: Path | None, parent: int | None, bars: bool, **options: Any) -> None:
    """A prefill worker."""
    _worker("prefill", config, parent, bars, options)


@click.command(help=WORKER_HELP.format(role="decode", port=6002, what="Decode, on KV that prefill workers push."))
@settings_options(WorkerSettings)
@parent_option
@bars_option
def decode(config: Path | None, parent: int | None, bars: bool, **options: Any) -> None:
    """A decode worker."""
    _worker("decode", config, parent, bars, options)


@click.command(help=WORKER_HELP.format(role="both", port=6001, what="Prefill and decode in one process."))
@settings_options(WorkerSettings)
@parent_option
@bars_option
def both(config: Path | None, parent: int | None, bars: bool, **options: Any) -> None:
    """A worker of both roles."""
    _worker("both", config, parent, bars, options)


@click.command(short_help="Ask a process whether it serves.")
@click.argument("address", default="127.0.0.1:50051", metavar="[HOST:PORT]", callback=address_argument)
@click.option("--service", default="", metavar="NAME", help="Full gRPC service name; default: the process.")
@click.option("--timeout", "timeout_s", type=click.FloatRange(0.1, 60), default=3.0, show_default=True, help="Seconds.")
@access_options
@click.pass_context
def health(context: click.Context, /, address: str, service: str, timeout_s: float) -> None:
    """Ask a process how it is; exit code 0 only if it serves.

    \b
    Example:
      twostroke health 127.0.0.1:50051 && echo ready
    """
    import asyncio

    from ..supervisor.health import Condition, check_once

    condition = asyncio.run(check_once(address, timeout_s, service, access().channel))
    click.echo(condition.value)
    context.exit(0 if condition is Condition.SERVING else 1)
