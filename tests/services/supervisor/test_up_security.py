"""`up` with certificates: where it asks for health, and what it refuses at once."""

import socket
from pathlib import Path
from typing import Any

import pytest

from twostroke.errors import ConfigError
from twostroke.services.grpc_setup import open_channel
from twostroke.services.security.cluster import cluster_dialer
from twostroke.services.security.tls import Dialer
from twostroke.services.settings import GatewaySettings, UpSettings, WorkerSettings
from twostroke.services.supervisor.up import plan

from ..certificates import Authority


def gateway(**values: Any) -> GatewaySettings:
    return GatewaySettings(**{"listen": "127.0.0.1:0", "http_listen": "off", **values})


def flag(arguments: tuple[str, ...], name: str) -> str:
    return arguments[arguments.index(name) + 1]


def test_a_door_with_tls_is_asked_on_a_port_for_us(tmp_path: Path) -> None:
    pair = Authority(tmp_path).issue("a")
    tls = {"tls_cert": pair.cert, "tls_key": pair.key}
    worker = WorkerSettings(role="both")
    plain = plan(UpSettings(), gateway(), worker)
    assert (plain.gateway.health_address, "--admin-listen" in plain.gateway.arguments) == ("", False)
    stack = plan(UpSettings(), gateway(**tls), worker)
    place = stack.gateway.health_address
    assert flag(stack.gateway.arguments, "--admin-listen") == place
    assert place.startswith("127.0.0.1:")
    assert place not in (stack.gateway.address, *(spec.address for spec in stack.workers))
    named = plan(UpSettings(), gateway(**tls, admin_listen="127.0.0.1:7"), worker)
    assert named.gateway.health_address == "127.0.0.1:7"


def test_ports_that_are_drawn_are_known_to_whoever_asks_there(tmp_path: Path) -> None:
    pair = Authority(tmp_path).issue("a")
    for tls in ({}, {"tls_cert": pair.cert, "tls_key": pair.key}):
        free = gateway(admin_listen="127.0.0.1:0", metrics_listen="127.0.0.1:0", **tls)
        door = plan(UpSettings(), free, WorkerSettings(role="both")).gateway
        admin, metrics = flag(door.arguments, "--admin-listen"), flag(door.arguments, "--metrics-listen")
        assert door.admin_address == admin
        assert door.health_address == (admin if tls else "")
        assert len({admin, metrics, door.address}) == 3
        assert not any(place.endswith(":0") for place in (admin, metrics, door.address))


def test_where_orders_cannot_be_taken(tmp_path: Path) -> None:
    pair = Authority(tmp_path).issue("a")
    worker = WorkerSettings(role="both")
    with pytest.raises(
        ConfigError, match=r"admin_listen: got '0\.0\.0\.0:0', takes an address of this machine"
    ) as caught:
        plan(UpSettings(), gateway(tls_cert=pair.cert, tls_key=pair.key, admin_listen="0.0.0.0:0"), worker)
    assert caught.value.field == "admin_listen"
    anywhere = plan(UpSettings(), gateway(admin_listen="0.0.0.0:0"), worker).gateway
    host, _, port = anywhere.admin_address.rpartition(":")
    assert (host, int(port) > 0) == ("127.0.0.1", True)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        place = f"127.0.0.1:{taken.getsockname()[1]}"
        for name in ("admin_listen", "metrics_listen"):
            with pytest.raises(
                ConfigError, match=rf"{name}: got .* takes an address that is free .* any: --"
            ) as caught:
                plan(UpSettings(), gateway(**{name: place}), worker)
            assert caught.value.field == name


def test_workers_with_certificates_are_asked_with_certificates(tmp_path: Path) -> None:
    ours = Authority(tmp_path)
    pair = ours.issue("a")
    cluster: dict[str, Any] = {"cluster_cert": pair.cert, "cluster_key": pair.key, "cluster_ca": ours.path}
    stack = plan(UpSettings(), gateway(**cluster), WorkerSettings(role="both", **cluster))
    assert all(isinstance(spec.channel, Dialer) for spec in stack.workers)
    assert stack.gateway.channel is open_channel
    assert {flag(spec.arguments, "--cluster-cert") for spec in (stack.gateway, *stack.workers)} == {str(pair.cert)}
    assert isinstance(cluster_dialer(gateway(**cluster)), Dialer)
    broken = {**cluster, "cluster_key": ours.path}
    with pytest.raises(ConfigError, match="cluster_cert"):
        plan(UpSettings(), gateway(**broken), WorkerSettings(role="both", **broken))
