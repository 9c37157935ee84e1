"""`twostroke up`: which processes make a stack on this machine, and with which settings."""

import asyncio
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import grpc.aio

from ...errors import ConfigError
from ...v1 import inference_pb2, inference_pb2_grpc
from ..configure import flags_of, setting_variables
from ..describe import flag
from ..grpc_setup import open_channel
from ..security.cluster import cluster_dialer, is_local, worker_credentials
from ..settings import GatewaySettings, UpSettings, WorkerSettings, split_address
from ..worker.role_change import successors
from .child import ChildSpec, Report
from .devices import placed
from .machine import cores, free_ports, listen_error, visible_gpus
from .supervisor import Supervisor

JOIN_S = 30.0  # most time for the gateway to meet workers that are ready
POLL_S = 0.1
ADDRESSES = ("listen", "http_listen", "admin_listen", "engine_listen", "metrics_listen")  # that a gateway listens on


def roles(up: UpSettings) -> list[tuple[str, str]]:
    """(role, name) of each worker, e.g. ('decode', 'decode-0')."""
    counts = (("prefill", up.prefill), ("decode", up.decode), ("both", up.both))
    return [(role, f"{role}-{index}") for role, count in counts for index in range(count)]


@dataclass(frozen=True, slots=True)
class Stack:
    """All processes."""

    up: UpSettings
    gateway: ChildSpec
    workers: list[ChildSpec]


def plan(
    up: UpSettings, gateway: GatewaySettings, worker: WorkerSettings, *, gpus: Callable[[], int] = visible_gpus
) -> Stack:
    """The gateway's and the workers' processes, with the addresses and the devices that they keep for good.

    `gpus`: how many there are. Raises ConfigError when nobody would decode, an address of the gateway is taken, or a
    GPU is wanting.
    """
    if up.decode + up.both == 0:
        raise ConfigError(
            f"decode: got 0, takes at least 1 where --both is 0 (prefill is {up.prefill}): somebody must decode",
            field="decode",
        )
    addresses = _addresses(gateway)
    people = roles(up)
    places = placed(up, worker, len(people), gpus)
    ports = free_ports(len(people) + len(addresses) + 1)
    gateway = gateway.model_copy(
        update={
            "workers": [f"127.0.0.1:{port}" for port in ports[: len(people)]],
            **{name: _settled(address, ports) for name, address in addresses.items()},
        }
    )
    worker_credentials(worker)  # what is wrong with them is said once, here
    channel = cluster_dialer(worker)
    threads = worker.threads or max(1, cores() // len(people))
    specs = []
    for (role, name), address, (device, memory) in zip(people, gateway.workers, places, strict=True):
        own = {"role": role, "name": name, "listen": address, "threads": threads}
        settings = worker.model_copy(update={**own, "device": device, "gpu_memory": memory})
        specs.append(replace(_spec(name, role, address, up, settings), channel=channel))
    door = _spec("gateway", "gateway", gateway.listen, up, gateway)
    if gateway.http_listen:
        scheme = "http" if gateway.tls_cert is None else "https"
        door = replace(door, http_url=f"{scheme}://{reachable(gateway.http_listen)}")
    if gateway.admin_listen:
        door = replace(door, admin_address=reachable(gateway.admin_listen))
    if gateway.tls_cert is not None:
        door = replace(door, health_address=door.admin_address)
    if gateway.processes > 1:  # whichever of them answers at their address speaks for itself
        watch = f"127.0.0.1:{ports.pop()}"
        door = replace(door, arguments=(*door.arguments, "--watch", watch), watch_address=watch)
    return Stack(up, door, specs)


def _addresses(gateway: GatewaySettings) -> dict[str, str]:
    """Where it is to listen, by the names of the settings. ConfigError where one is taken, or none is left for us."""
    places = {name: getattr(gateway, name) for name in ADDRESSES} | {"http_listen": gateway.http_place}
    if gateway.tls_cert is not None:  # its own door takes TLS only, and perhaps certificates that we have not
        places["admin_listen"] = gateway.admin_listen or "127.0.0.1:0"
        if not is_local(places["admin_listen"]):
            raise ConfigError(
                f"admin_listen: got {gateway.admin_listen!r}, takes an address of this machine alone here (such as "
                "127.0.0.1:0), as `up` asks for health there; or run `twostroke gateway` by itself",
                field="admin_listen",
            )
    for name, address in places.items():
        if address and (why := listen_error(address)):
            none = f", none: {flag(name)} off" if name == "http_listen" else ""
            raise ConfigError(
                f"{name}: got {address!r}, takes an address that is free ({why.lower()}); "
                f"any: {flag(name)} 127.0.0.1:0{none}",
                field=name,
            )
    return places


def _settled(address: str, ports: list[int]) -> str:
    """The address, with one of these ports where it asks for any."""
    host, port = split_address(address) if address else ("", 0)
    return f"{host}:{port or ports.pop()}" if address else ""


def _spec(name: str, role: str, address: str, up: UpSettings, settings: GatewaySettings | WorkerSettings) -> ChildSpec:
    """Everything is told by flags: variables and files were read once, here, and must not speak twice."""
    command = (sys.executable, "-m", "twostroke.services.cli")
    words = (*flags_of(settings), "--parent", str(os.getpid()))
    environment = {key: value for key, value in os.environ.items() if key.upper() not in setting_variables()}
    return ChildSpec(
        name=name,
        arguments=(*command, role, *words),
        address=reachable(address),
        environment=environment | {"PYTHONUNBUFFERED": "1"},
        silence_s=settings.silence_s,
        ready_s=up.ready_s,
        drain_s=settings.drain_s,
        successors={} if role == "gateway" else successors(command, words),
    )


def reachable(address: str) -> str:
    """Where this machine reaches what listens on `address`: a wildcard is no place to connect to."""
    host, port = split_address(address)
    return f"{'127.0.0.1' if host in ('0.0.0.0', '[::]') else host}:{port}"


async def gateway_joined(address: str, up: UpSettings) -> None:
    """Returns once the gateway at `address` sees all workers, or after JOIN_S: it serves with those that it has.

    At once where it does not say: it asks for credentials, or that is not served there."""
    channel = open_channel(address)
    stub = inference_pb2_grpc.InferenceStub(channel)
    try:
        for _ in _until(JOIN_S):
            try:
                model = await stub.GetModel(inference_pb2.GetModelRequest(), timeout=1.0)
            except grpc.aio.AioRpcError as error:
                if error.code() in (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.UNAUTHENTICATED):
                    return
            else:
                if model.prefill_workers >= up.prefill and model.decode_workers >= up.decode + up.both:
                    return
            await asyncio.sleep(POLL_S)
    finally:
        await channel.close()


def _until(seconds: float) -> Iterator[None]:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        yield


async def run(stack: Stack, report: Report) -> int:
    """Runs the stack until a signal; the exit code."""
    joined = partial(gateway_joined, stack.gateway.health_address or stack.gateway.address, stack.up)
    return await Supervisor.of(stack.gateway, stack.workers, report, joined).run()
