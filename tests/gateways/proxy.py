"""A proxy as a process in front of a stack."""

import asyncio
import contextlib
import os
import shutil
import signal
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from twostroke.services.grpc_setup import open_channel
from twostroke.services.supervisor.machine import free_ports

from ..e2e.harness import Client, Stack
from ..services.certificates import Pair
from .kinds import CONFIGURATIONS, Kind, program, replaced

START_S = 60.0
STOP_S = 10.0


@dataclass
class Proxy:
    """`grpc`, `http`, `tls`: host:port. `folder` holds its configuration, filled in, and what it writes."""

    kind: Kind
    path: str
    folder: Path
    grpc: str
    http: str
    tls: str
    processes: list[asyncio.subprocess.Process] = field(default_factory=list)

    @contextlib.asynccontextmanager
    async def client(self, *, tls: bytes | None = None) -> AsyncIterator[Client]:
        """With a connection of its own; `tls`: the authority's certificate."""
        credentials = None if tls is None else grpc.ssl_channel_credentials(tls)
        channel = open_channel(self.grpc if tls is None else self.tls, credentials=credentials)
        try:
            yield Client(channel)
        finally:
            await channel.close()

    async def healthy(self) -> None:
        """Waits until calls go through, on a connection of their own."""
        request = health_pb2.HealthCheckRequest(service="twostroke.v1.Inference")
        async with asyncio.timeout(START_S):
            while True:
                assert self.processes[-1].returncode is None, (self.folder / "log").read_text()
                async with self.client() as client:
                    with contextlib.suppress(grpc.aio.AioRpcError):
                        answer = await health_pb2_grpc.HealthStub(client.channel).Check(request, timeout=5)
                        if answer.status == health_pb2.HealthCheckResponse.SERVING:
                            return
                await asyncio.sleep(0.05)

    async def reload(self) -> None:
        """Takes its configuration in anew."""
        if self.kind.signal:
            self.processes[-1].send_signal(signal.Signals[self.kind.signal])
        elif self.kind.successor:
            await self.spawn(self.kind.successor)
        else:
            await self.run(self.kind.reload)

    async def spawn(self, arguments: Iterable[str]) -> None:
        """Starts the program; what it says goes to the log."""
        with (self.folder / "log").open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                self.path, *self._filled(arguments), stdout=log, stderr=log, env=self._environment()
            )
        self.processes.append(process)

    async def run(self, arguments: Iterable[str]) -> None:
        """The program to its end; AssertionError with what it says where it fails."""
        process = await asyncio.create_subprocess_exec(
            self.path, *self._filled(arguments),
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT, env=self._environment(),
        )  # fmt: skip
        output, _ = await process.communicate()
        assert process.returncode == 0, output.decode()

    async def stop(self) -> None:
        """Ends what runs."""
        running = [process for process in self.processes if process.returncode is None]
        for process in running:
            process.terminate()
        for process in running:
            try:
                await asyncio.wait_for(process.wait(), STOP_S)
            except TimeoutError:
                process.kill()
                await process.wait()

    def _filled(self, arguments: Iterable[str]) -> list[str]:
        number = self.folder / "id"
        words = {"FILE": str(self.folder / self.kind.file), "ID_FILE": str(number)}
        if number.exists():
            words["ID"] = number.read_text().strip()
        return [words.get(word, word) for word in arguments]

    def _environment(self) -> dict[str, str]:
        homes = dict.fromkeys(("HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME"), str(self.folder))
        return {**os.environ, **homes}


@contextlib.asynccontextmanager
async def proxied(
    kind: Kind, stack: Stack, folder: Path, certificate: Pair, *, impatient: bool = False
) -> AsyncIterator[Proxy]:
    """The proxy in front of the stack. `impatient`: what is silent for 3 s is ended."""
    path = program(kind)
    assert path is not None
    shutil.copy(certificate.cert, folder / "tls.crt")
    shutil.copy(certificate.key, folder / "tls.key")
    ports = dict(zip(("GRPC", "HTTP", "TLS", "ADMIN"), map(str, free_ports(4)), strict=True))
    text = replaced((CONFIGURATIONS / kind.name / kind.file).read_text(encoding="utf-8"), kind.places)
    if impatient:
        text = replaced(text, kind.silence)
    http = stack.http.removeprefix("http://")
    words = {"UPSTREAM_GRPC": stack.address, "UPSTREAM_HTTP": http, "CERTS": str(folder), "TMP": str(folder), **ports}
    words |= {"UPSTREAM_PORT_GRPC": stack.address.rpartition(":")[2], "UPSTREAM_PORT_HTTP": http.rpartition(":")[2]}
    for word, value in words.items():
        text = text.replace(f"@{word}@", value)
    (folder / kind.file).write_text(text, encoding="utf-8")
    proxy = Proxy(kind, path, folder, *(f"127.0.0.1:{ports[name]}" for name in ("GRPC", "HTTP", "TLS")))
    await proxy.run(kind.validate)
    await proxy.spawn(kind.run)
    try:
        await proxy.healthy()
        yield proxy
    finally:
        await proxy.stop()
