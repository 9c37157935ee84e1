"""The proxies that compose/gateways/ has configurations for: programs, and what a test replaces in their files."""

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
CONFIGURATIONS = ROOT / "compose" / "gateways"
ENVOY = ROOT / ".clients" / "envoy" / "bin" / "envoy"


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
    # How it takes its configuration in anew, by one of: a signal; the program called with arguments; a process with
    # arguments that takes over, where ID is what the first one wrote to ID_FILE.
    signal: str = ""
    reload: tuple[str, ...] = ()
    successor: tuple[str, ...] = ()


# Of a hot restart: the old process goes on with its streams for an hour.
ENVOY_FLAGS = ("--drain-time-s", "1", "--parent-shutdown-time-s", "3600", "--concurrency", "1", "-l", "warning")
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
        ("-c", "FILE", "--use-dynamic-base-id", "--base-id-path", "ID_FILE", *ENVOY_FLAGS),
        4096,
        {"stream_idle_timeout: 3600s": "stream_idle_timeout: 3s"},
        successor=("-c", "FILE", "--base-id", "ID", "--restart-epoch", "1", *ENVOY_FLAGS),
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
        signal="SIGHUP",
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
        signal="SIGUSR2",
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
        reload=("reload", "--adapter", "caddyfile", "--config", "FILE", "--force"),
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
