"""`up` with certificates: where it asks for health, and what it refuses at once."""

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
