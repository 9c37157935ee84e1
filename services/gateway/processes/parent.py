"""Starts the gateway processes of one set of addresses, watches them, starts anew those that die."""

import asyncio
import logging
import math
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc  # type: ignore[import-untyped]

from ....errors import ConfigError
from ...configure import flags_of, setting_variables
from ...grpc_setup import bind, create_server
from ...settings import GatewaySettings
from ...stopping import Stopping
from ...supervisor.child import Child, ChildSpec
from .memory import SharedMemory, create_file
from .ports import held
from .share import FIGURES, FIGURES_VARIABLE, Share

MOST_PATH = 96  # bytes: a socket's own may have 107
READY_S = math.inf  # for a process until it knows a worker that decodes: there may be none yet

logger = logging.getLogger(__name__)


class Parent:
    """Of `settings.processes` processes. It serves nothing but its own health."""

    def __init__(self, settings: GatewaySettings, memory: SharedMemory, descriptor: int, folder: Path) -> None:
        """`settings`: with the addresses' real ports. `descriptor`: of the memory."""
        self._memory = memory
        shares = [Share(index, settings.processes, descriptor, folder) for index in range(settings.processes)]
        self._index = {_name(settings, share): share.index for share in shares}
        self.children = [Child(_spec(settings, share), self) for share in shares]

    def event(self, event: str, **details: object) -> None:
        """What happens to a process. What one that is gone had inside is free before another one takes its place."""
        name = str(details["name"])
        if event == "exited":
            self._memory.forget(self._index[name])
        said = ", ".join(f"{key} {value}" for key, value in details.items() if key not in ("name", "address"))
        wrong = event in ("hung", "gave_up") or (event == "exited" and details.get("code"))
        level = logging.WARNING if wrong else logging.INFO
        logger.log(level, "gateway process %s: %s%s", name, event.replace("_", " "), f" ({said})" if said else "")

    @property
    def ready(self) -> bool:
        """Whether all serve now."""
        return all(child.ready.is_set() for child in self.children)

    async def run(self, stopping: Stopping) -> int:
        """Until the first signal, which all get, as they get the second; or until one cannot be started. The exit
        code. No process outlives it."""
        running = [asyncio.create_task(child.run(), name=child.spec.name) for child in self.children]
        told = asyncio.create_task(stopping.first.wait())
        hurry = asyncio.create_task(self._hurry(stopping))
        try:
            await asyncio.wait([*running, told], return_when=asyncio.FIRST_COMPLETED)
            await asyncio.gather(*(child.stop() for child in self.children))
            codes = await asyncio.gather(*running)
        finally:
            for task in (*running, told, hurry):
                task.cancel()
            await asyncio.gather(*running, told, hurry, return_exceptions=True)
        return next((code for code in codes if code), 0)

    async def _hurry(self, stopping: Stopping) -> None:
        await stopping.second.wait()
        for child in self.children:
            child.hurry()


class ReadyServicer(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """SERVING while all processes do."""

    def __init__(self, parent: Parent) -> None:
        self._parent = parent

    async def Check(self, request: Any, context: Any) -> Any:  # noqa: N802 - gRPC's name
        """Whatever the service is."""
        kind = health_pb2.HealthCheckResponse
        return kind(status=kind.SERVING if self._parent.ready else kind.NOT_SERVING)


async def serve_all(settings: GatewaySettings, watch: str = "") -> int:
    """Runs until SIGTERM or SIGINT; the exit code. `watch`: host:port where a supervisor asks how all of them are.
    ConfigError where an address cannot be had."""
    with held(settings) as placed, _shared() as (descriptor, folder):
        parent = Parent(placed, SharedMemory(descriptor, settings.processes), descriptor, folder)
        server = await _watched(parent, watch) if watch else None
        stopping = Stopping()
        stopping.install()
        try:
            return await parent.run(stopping)
        finally:
            stopping.remove()
            if server is not None:
                await server.stop(None)


async def _watched(parent: Parent, address: str) -> grpc.aio.Server:
    server = create_server()
    health_pb2_grpc.add_HealthServicer_to_server(ReadyServicer(parent), server)
    try:
        bind(server, address)
    except RuntimeError as error:
        raise ConfigError(f"watch: cannot listen on {address}", field="watch") from error
    await server.start()
    return server


@contextmanager
def _shared() -> Iterator[tuple[int, Path]]:
    """The memory's file, and a folder for this user alone: a socket's path must be short."""
    descriptor = create_file()
    try:
        folder = Path(tempfile.mkdtemp(prefix="twostroke-gateway-"))
        try:
            if len(os.fsencode(folder)) > MOST_PATH:
                raise ConfigError(f"TMPDIR: {folder} is too long for sockets: name a shorter folder", field="TMPDIR")
            (folder / FIGURES).mkdir()
            yield descriptor, folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(descriptor)


def _name(settings: GatewaySettings, share: Share) -> str:
    return f"{settings.name or 'gateway'}-{share.index}"[-64:]


def _spec(settings: GatewaySettings, share: Share) -> ChildSpec:
    """Everything is told by flags, as `twostroke up` does it."""
    own = settings.model_copy(update={"name": _name(settings, share)})
    command: Sequence[str] = (sys.executable, "-m", "twostroke.services.cli", "gateway")
    words = (*flags_of(own), "--parent", str(os.getpid()), "--share", share.text())
    environment: Mapping[str, str] = {k: v for k, v in os.environ.items() if k.upper() not in setting_variables()}
    return ChildSpec(
        name=own.name,
        arguments=(*command, *words),
        address=share.socket(share.index),
        environment={**environment, "PYTHONUNBUFFERED": "1", FIGURES_VARIABLE: str(share.figures)},
        silence_s=settings.silence_s,
        ready_s=READY_S,
        drain_s=settings.drain_s,
        descriptors=(share.descriptor,),
    )
