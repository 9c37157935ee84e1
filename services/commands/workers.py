"""`twostroke workers list|drain|undrain|role`: a gateway's workers."""

import asyncio
import json
from collections.abc import Callable, MutableMapping
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from ...v1 import cluster_pb2 as pb
from ..access_options import access
from ..options import gateway_option

ROLES = {
    "prefill": pb.WORKER_ROLE_PREFILL,
    "decode": pb.WORKER_ROLE_DECODE,
    "both": pb.WORKER_ROLE_BOTH,
}


@click.group()
def workers() -> None:
    """List a gateway's workers, drain them, change their roles.

    \b
    Examples:
      twostroke workers list
      twostroke workers drain decode-1
      twostroke workers role decode-1 prefill
    """


@workers.command(name="list")
@gateway_option
@click.option("--json", "as_json", is_flag=True, help="As a JSON list.")
def list_workers(address: str, as_json: bool) -> None:
    """List the workers: role, state, load, and why one is absent.

    \b
    Example:
      twostroke workers list --json
    """
    found = _call(address, lambda admin: admin.workers())
    if as_json:
        click.echo(json.dumps([plain(worker) for worker in found], indent=2))
        return
    table = Table("worker", "address", "role", "state", "pages free", "running", "waiting", "why")
    for worker in found:
        absent = worker.state == pb.WORKER_STATE_ABSENT
        table.add_row(
            worker.name or "?",
            worker.address,
            _word(pb.WorkerRole.Name(worker.role)),
            _word(pb.WorkerState.Name(worker.state)),
            "" if absent else f"{worker.free_pages}/{worker.pages}",
            "" if absent else str(worker.running),
            "" if absent else f"{worker.waiting} ({worker.waiting_tokens} tokens)",
            worker.reason,
        )
    Console().print(table)


@workers.command()
@click.argument("worker")
@gateway_option
@click.option(
    "--within",
    "within_s",
    type=click.FloatRange(0.001, 86_400),
    default=None,
    metavar="SECONDS",
    help="What still runs then goes on at other workers; default: it may take as long as it takes.",
)
def drain(worker: str, address: str, within_s: float | None) -> None:
    """Let WORKER finish what it has and take nothing new.

    WORKER is a name, or host:port.

    \b
    Example:
      twostroke workers drain decode-1 --within 60
    """
    told = _call(address, lambda admin: admin.drain(worker, True, within_s or 0.0))
    click.echo(f"{told.name} drains: {told.requests} requests of this gateway are there")


@workers.command()
@click.argument("worker")
@gateway_option
def undrain(worker: str, address: str) -> None:
    """Let WORKER take work again.

    WORKER is a name, or host:port.

    \b
    Example:
      twostroke workers undrain decode-1
    """
    told = _call(address, lambda admin: admin.drain(worker, False, 0.0))
    click.echo(f"{told.name} takes work")


@workers.command()
@click.argument("worker")
@click.argument("role", type=click.Choice(list(ROLES)))
@gateway_option
@click.option("--force", is_flag=True, help="Even if no other worker decodes.")
@click.option("--wait/--no-wait", default=True, show_default=True, help="Until it is back.")
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(1, 3600),
    default=120.0,
    show_default=True,
    help="Most seconds to wait.",
)
def role(worker: str, role: str, address: str, force: bool, wait: bool, timeout_s: float) -> None:
    """Make WORKER a prefill, decode or both worker.

    WORKER is a name, or host:port. It finishes what it has, ends, and comes back at the same address; requests that
    take longer than its --drain-s go on at other workers.

    \b
    Example:
      twostroke workers role decode-1 prefill
    """
    told = _call(address, lambda admin: admin.become(worker, ROLES[role], force, timeout_s if wait else 0.0))
    click.echo(f"{told.name} is a {role} worker now" if wait else f"{told.name} will be a {role} worker")


def plain(worker: pb.WorkerInfo) -> dict[str, Any]:
    """For JSON: every field, enumerations in words."""
    values = {field.name: getattr(worker, field.name) for field in worker.DESCRIPTOR.fields}
    values |= {name: dict(value) for name, value in values.items() if isinstance(value, MutableMapping)}
    values["role"] = _word(pb.WorkerRole.Name(worker.role))
    values["state"] = _word(pb.WorkerState.Name(worker.state))
    values["incarnation"] = f"{worker.incarnation:016x}"
    values["transports"] = [
        {
            "decode_incarnation": f"{pair.decode_incarnation:016x}",
            "transport": pair.transport,
            "gb_per_s": round(pair.gb_per_s, 3),
        }
        for pair in worker.transports
    ]
    return values


def _word(name: str) -> str:
    word = name.removeprefix("WORKER_ROLE_").removeprefix("WORKER_STATE_").lower()
    return "?" if word == "unspecified" else word


def _call(address: str, work: Callable[[Any], Any]) -> Any:
    from ..client.cluster_client import ClusterClient

    reached = access()

    async def run() -> Any:
        async with ClusterClient(address, access=reached) as admin:
            return await work(admin)

    return asyncio.run(run())
