"""`twostroke keys new`: API keys for a gateway's file."""

import os
import time
from pathlib import Path

import click

from ...errors import ConfigError
from ..security.api_keys import new_key
from ..security.limits import LEAST_URGENT, MOST_AT_ONCE, MOST_PER_MINUTE, MOST_URGENT, Limits

DAY_S = 86_400.0
_RATE = click.IntRange(0, MOST_PER_MINUTE)


def _a_minute(what: str) -> str:
    return f"{what} of the tenant a minute; 0: any number.  [default: the gateway's setting of that name]"


@click.group()
def keys() -> None:
    """Make API keys for --api-keys of a gateway.

    \b
    Example:
      twostroke keys new --tenant acme --file keys.jsonl
      twostroke gateway --api-keys keys.jsonl --workers 127.0.0.1:6001,127.0.0.1:6002
    """


@keys.command()
@click.option("--tenant", required=True, metavar="NAME", help="On whose behalf its bearer acts.")
@click.option("--admin", is_flag=True, help="It may also give orders to the cluster: list, drain, roles.")
@click.option(
    "--max-requests",
    type=click.IntRange(0, MOST_AT_ONCE),
    default=None,
    metavar="N",
    help="Requests of the tenant at once; 0: no limit of its own.  [default: the gateway's --tenant-requests]",
)
@click.option("--requests-per-minute", type=_RATE, default=None, metavar="N", help=_a_minute("Requests"))
@click.option("--input-tokens-per-minute", type=_RATE, default=None, metavar="N", help=_a_minute("Prompt tokens"))
@click.option("--output-tokens-per-minute", type=_RATE, default=None, metavar="N", help=_a_minute("Generated tokens"))
@click.option(
    "--priority",
    type=click.IntRange(MOST_URGENT, LEAST_URGENT),
    default=None,
    metavar="N",
    help="Most urgent (lowest) priority that it may ask for.  [default: the gateway's --tenant-priority]",
)
@click.option("--days", type=click.FloatRange(0.001, 36_500), default=None, help="It holds for so long; default: ever.")
@click.option(
    "--file",
    type=click.Path(path_type=Path, dir_okay=False),
    default=None,
    metavar="FILE",
    help="Append the line to this file (made if need be) and print the key alone.",
)
def new(tenant: str, admin: bool, days: float | None, file: Path | None, **limits: int | None) -> None:
    """Print a new key, and the line that the gateway's file needs to know it.

    The key is seen here and never again: the line holds its salted hash. A running gateway reads the file again within
    a second of a change; a key is withdrawn by removing its line.

    \b
    Example:
      twostroke keys new --tenant acme --max-requests 32
    """
    expires = None if days is None else time.time() + days * DAY_S
    key, kept = new_key(tenant, admin=admin, limits=Limits(**limits), expires=expires)
    if file is None:
        click.echo(f"key (give it to the tenant; it is not shown again):\n  {key}\nline for the file of --api-keys:")
        click.echo(kept.line())
        return
    _append(file, kept.line())
    click.echo(key)


def _append(path: Path, line: str) -> None:
    """One write, so that a gateway that reads at this moment sees all of the line or nothing."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        with open(descriptor, "r+b", buffering=0) as file:
            size = file.seek(0, os.SEEK_END)
            whole = size == 0 or os.pread(descriptor, 1, size - 1) == b"\n"
            file.write(f"{'' if whole else chr(10)}{line}\n".encode())
    except OSError as error:
        raise ConfigError(f"file: cannot write {path}: {error.strerror}", field="file") from error
