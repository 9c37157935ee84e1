"""The proxies that compose/gateways/ has configurations for, each as a process in front of a stack."""

import asyncio
import contextlib
import os
import shutil
import signal
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from twostroke.services.grpc_setup import open_channel
from twostroke.services.supervisor.machine import free_ports

from ..e2e.harness import Client, Stack
from ..services.certificates import Pair

ROOT = Path(__file__).parents[2]
CONFIGURATIONS = ROOT / "compose" / "gateways"
ENVOY = ROOT / ".clients" / "envoy" / "bin" / "envoy"
START_S = 30.0


@dataclass(frozen=True)
class Kind:
    """A program, and what of its configuration names places. @GRPC@, @HTTP@, @TLS@, @ADMIN@ stand for ports
    that are free, @CERTS@ for a folder with tls.crt and tls.key, @TMP@ for the test's own."""

    name: str
    file: str  # of the configuration
    program: str
    places: Mapping[str, str]  # replaced, each at least once
    validate: tuple[str, ...]  # arguments; FILE is the configuration
    run: tuple[str, ...]
    streams: int  # that one connection of a client takes at once
    silence: Mapping[str, str] = field(default_factory=dict)  # replaced to shorten time-outs of silence to 3 s
    reload: tuple[str, ...] = ()  # arguments of the same program, or a signal's name


GATEWAY = {"gateway:50051": "@UPSTREAM_GRPC@", "gateway:8000": "@UPSTREAM_HTTP@"}
KINDS = (
    Kind(
        "envoy",
        "envoy.yaml",
        str(ENVOY),
        {
            "address: gateway, port_value: 50051": "address: 127.0.0.1, port_value: @UPSTREAM_PORT_GRPC@",
            "address: gateway, port_value: 8000": "address: 127.0.0.1, port_value: @UPSTREAM_PORT_HTTP@",
            "address: 0.0.0.0, port_value: 50051": "address: 127.0.0.1, port_value: @GRPC@",
            "address: 0.0.0.0, port_value: 8000": "address: 127.0.0.1, port_value: @HTTP@",
            "address: 0.0.0.0, port_value: 8443": "address: 127.0.0.1, port_value: @TLS@",
            "port_value: 9901": "port_value: @ADMIN@",
            "/certs/": "@CERTS@/",
            "/etc/envoy/": f"{CONFIGURATIONS / 'envoy'}/",
        },
        ("--mode", "validate", "-c", "FILE", "--concurrency", "1"),
        ("-c", "FILE", "--concurrency", "1", "--disable-hot-restart", "-l", "warning"),
        4096,
        {"stream_idle_timeout: 3600s": "stream_idle_timeout: 3s"},
    ),
    Kind(
        "nginx",
        "nginx.conf",
        "nginx",
        {
            **GATEWAY,
            "listen 50051 ": "listen 127.0.0.1:@GRPC@ ",
            "listen 8000;": "listen 127.0.0.1:@HTTP@;",
            "listen 8443 ": "listen 127.0.0.1:@TLS@ ",
            "worker_processes auto;": "worker_processes 1;",
            "/certs/": "@CERTS@/",
            " /tmp/": " @TMP@/",
        },
        ("-t", "-c", "FILE"),
        ("-c", "FILE"),
        4096,
        {"grpc_read_timeout 60s": "grpc_read_timeout 3s", "proxy_read_timeout 1h": "proxy_read_timeout 3s"},
        ("HUP",),
    ),
    Kind(
        "haproxy",
        "haproxy.cfg",
        "haproxy",
        {
            **GATEWAY,
            "bind :50051 ": "bind 127.0.0.1:@GRPC@ ",
            "bind :8000\n": "bind 127.0.0.1:@HTTP@\n",
            "bind :8443 ": "bind 127.0.0.1:@TLS@ ",
            "port 8000": "port @UPSTREAM_PORT_HTTP@",
            "/certs/": "@CERTS@/",
        },
        ("-c", "-f", "FILE"),
        ("-W", "-f", "FILE"),
        4096,
        {"timeout client 1h": "timeout client 3s", "timeout server 1h": "timeout server 3s"},
        ("USR2",),
    ),
    Kind(
        "caddy",
        "Caddyfile",
        "caddy",
        {
            **GATEWAY,
            "http://:50051 ": "http://:@GRPC@ ",
            "http://:8000 ": "http://:@HTTP@ ",
            "https://:8443 ": "https://:@TLS@ ",
            "localhost:2019": "localhost:@ADMIN@",
            "/certs/": "@CERTS@/",
        },
        ("validate", "--adapter", "caddyfile", "--config", "FILE"),
        ("run", "--adapter", "caddyfile", "--config", "FILE"),
        250,
        {},
        ("reload", "--adapter", "caddyfile", "--config", "FILE", "--force"),
    ),
)


def replaced(text: str, places: Mapping[str, str]) -> str:
    """AssertionError where one of them is not there."""
    for old, new in places.items():
        assert old in text, f"the configuration has no {old!r}"
        text = text.replace(old, new)
    return text


def program(kind: Kind) -> str | None:
    """Its path, if it is here."""
    return shutil.which(kind.program, path=f"{os.environ['PATH']}:/usr/sbin:/usr/local/sbin")


@dataclass
class Proxy:
    """A running one. `grpc`, `http`, `tls`: host:port."""

    kind: Kind
    file: Path
    log: Path
    path: str
    process: asyncio.subprocess.Process
    grpc: str
    http: str
    tls: str
    environment: dict[str, str]

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
        """Waits until calls go through."""
        async with asyncio.timeout(START_S), self.client() as client:
            stub = health_pb2_grpc.HealthStub(client.channel)
            while True:
                assert self.process.returncode is None, self.log.read_text()
                try:
                    answer = await stub.Check(
                        health_pb2.HealthCheckRequest(service="twostroke.v1.Inference"), timeout=2
                    )
                except grpc.aio.AioRpcError:
                    await asyncio.sleep(0.05)
                else:
                    if answer.status == health_pb2.HealthCheckResponse.SERVING:
                        return

    async def reload(self) -> None:
        """Takes its configuration in anew."""
        if self.kind.reload[0].isupper():
            self.process.send_signal(getattr(signal, f"SIG{self.kind.reload[0]}"))
        else:
            await self.run(*self.kind.reload)

    async def run(self, *arguments: str) -> None:
        """The program to its end; AssertionError where it fails."""
        await ended(
            self.path, *(str(self.file) if word == "FILE" else word for word in arguments), env=self.environment
        )


async def ended(*command: str, env: dict[str, str]) -> None:
    """Runs a program; AssertionError with what it says where it fails."""
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT, env=env
    )
    output, _ = await process.communicate()
    assert process.returncode == 0, output.decode()


@contextlib.asynccontextmanager
async def proxied(
    kind: Kind, stack: Stack, folder: Path, certificate: Pair, *, impatient: bool = False
) -> AsyncIterator[Proxy]:
    """The proxy in front of the stack. `impatient`: what is silent for 3 s is ended."""
    path = program(kind)
    assert path is not None
    shutil.copy(certificate.cert, folder / "tls.crt")
    shutil.copy(certificate.key, folder / "tls.key")
    text = (CONFIGURATIONS / kind.name / kind.file).read_text(encoding="utf-8")
    text = replaced(text, kind.places)
    if impatient:
        text = replaced(text, kind.silence)
    ports = dict(zip(("GRPC", "HTTP", "TLS", "ADMIN"), free_ports(4), strict=True))
    upstream = stack.http.removeprefix("http://")
    words = {"UPSTREAM_PORT_GRPC": stack.address.rpartition(":")[2], "UPSTREAM_PORT_HTTP": upstream.rpartition(":")[2]}
    words |= {"UPSTREAM_GRPC": stack.address, "UPSTREAM_HTTP": upstream, "CERTS": str(folder), "TMP": str(folder)}
    for word, value in (words | {name: str(port) for name, port in ports.items()}).items():
        text = text.replace(f"@{word}@", value)
    file, log = folder / kind.file, folder / "log"
    file.write_text(text, encoding="utf-8")
    environment = {**os.environ, "HOME": str(folder), "XDG_CONFIG_HOME": str(folder), "XDG_DATA_HOME": str(folder)}

    def filled(words: tuple[str, ...]) -> list[str]:
        return [str(file) if word == "FILE" else word for word in words]

    await ended(path, *filled(kind.validate), env=environment)
    with log.open("wb") as errors:
        process = await asyncio.create_subprocess_exec(
            path, *filled(kind.run), stdout=errors, stderr=errors, env=environment
        )
    proxy = Proxy(
        kind, file, log, path, process,
        *(f"127.0.0.1:{ports[name]}" for name in ("GRPC", "HTTP", "TLS")), environment,
    )  # fmt: skip
    try:
        await proxy.healthy()
        yield proxy
    finally:
        if process.returncode is None:
            process.terminate()
            try:
                await asyncio.wait_for(process.wait(), 10)
            except TimeoutError:
                process.kill()
                await process.wait()
