"""Security between our processes: sessions over mutual TLS, renewed certificates, settings that do not fit."""

from pathlib import Path
from typing import Any

import pytest

from twostroke.errors import ConfigError
from twostroke.services.gateway.gateway import Gateway, load_model
from twostroke.services.grpc_setup import bind, open_channel
from twostroke.services.security import watched_file
from twostroke.services.security.cluster import (
    cluster_dialer,
    is_local,
    warn_of_open_worker,
    worker_credentials,
    worker_server,
)
from twostroke.services.settings import GatewaySettings, WorkerSettings
from twostroke.v1 import worker_pb2_grpc

from ..certificates import Authority, Pair
from ..cluster import until
from ..stand_in_worker import StandIn


class Secured(StandIn):
    """A stand-in that listens as a worker does."""

    settings = WorkerSettings(role="both")

    async def start(self, address: str = "127.0.0.1:0") -> str:
        self._server = worker_server(self.settings)
        worker_pb2_grpc.add_WorkerServicer_to_server(self, self._server)
        self.address = bind(self._server, address, worker_credentials(self.settings))
        await self._server.start()
        return self.address


def names(pair: Pair, ours: Authority, **more: Any) -> dict[str, Any]:
    return {"cluster_cert": pair.cert, "cluster_key": pair.key, "cluster_ca": ours.path, **more}


async def test_a_session_stands_over_mutual_tls(
    tiny_llama_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watched_file, "LOOK_S", 0.0)
    ours, theirs = Authority(tmp_path, "ours"), Authority(tmp_path, "theirs")
    worker, client = Secured("both", "b0"), theirs.issue("gateway")
    worker.settings = WorkerSettings(
        role="both", **names(ours.issue("w", "127.0.0.1"), ours, cluster_peers=["gateway"])
    )
    place = await worker.start()
    settings = GatewaySettings(model=str(tiny_llama_dir), listen="127.0.0.1:0", workers=[place], **names(client, ours))
    gateway = Gateway(settings, load_model(settings))
    await gateway.start()
    try:
        known = gateway.fleet.clients[0]
        await until(lambda: known.reason not in ("", "not connected yet"))
        assert not gateway.fleet.loads()  # its certificate is of another authority
        client.replace_by(ours.issue("other"))
        await until(lambda: "PERMISSION_DENIED" in known.reason)
        assert "names" in known.reason
        client.replace_by(ours.issue("gateway"))
        await until(lambda: gateway.fleet.loads())
    finally:
        await gateway.stop()
        await worker.stop()


async def test_without_settings_everything_is_plaintext() -> None:
    assert worker_credentials(WorkerSettings(role="both")) is None
    assert cluster_dialer(GatewaySettings()) is open_channel


def test_settings_that_do_not_fit(tmp_path: Path) -> None:
    ours = Authority(tmp_path, "ours")
    pair = ours.issue("w")
    whole = names(pair, ours)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"cluster_cert": pair.cert}, "cluster_key: got nothing"),
        ({"cluster_cert": pair.cert, "cluster_key": pair.key}, "cluster_ca: got nothing"),
        ({"cluster_ca": ours.path}, "cluster_cert: got nothing"),
        ({"cluster_peers": ["a"]}, "cluster_peers: takes"),
        ({**whole, "cluster_peers": ["a"], "cluster_client_certs": False}, "cluster_peers: takes"),
        ({**whole, "cluster_ca": tmp_path / "none"}, "cluster_ca: cannot read"),
    ]
    for values, told in cases:
        with pytest.raises(ConfigError, match=told):
            worker_credentials(WorkerSettings(role="both", **values))
    assert worker_credentials(WorkerSettings(role="both", **whole)) is not None
    with pytest.raises(ConfigError, match="cluster_ca: cannot read"):
        cluster_dialer(GatewaySettings(cluster_ca=tmp_path / "none"))


@pytest.mark.parametrize(
    ("address", "local"),
    [
        ("127.0.0.1:1", True),
        ("127.8.9.1:1", True),
        ("[::1]:1", True),
        ("localhost:1", True),
        (":1", False),
        ("0.0.0.0:1", False),
        ("[::]:1", False),
        ("10.0.0.1:1", False),
        ("localhost.example:1", False),
    ],
)
def test_local_addresses(address: str, local: bool) -> None:
    assert is_local(address) is local


def test_open_workers_are_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ours = Authority(tmp_path, "ours")
    whole = names(ours.issue("w"), ours)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"listen": "127.0.0.1:0"}, ""),
        ({"listen": "0.0.0.0:0"}, "without TLS"),
        ({"listen": "0.0.0.0:0", **whole}, ""),
        ({"listen": "0.0.0.0:0", **whole, "cluster_client_certs": False}, "without authentication"),
    ]
    for values, told in cases:
        caplog.clear()
        warn_of_open_worker(WorkerSettings(role="both", **values))
        assert bool(caplog.records) is bool(told)
        assert told in caplog.text
