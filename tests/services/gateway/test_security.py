"""A gateway that asks who calls: keys, tenants, certificates, orders, reflection, limits of connections."""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from twostroke.errors import ConfigError, PermissionDenied, Unauthenticated
from twostroke.services.client.access import Access, Secret
from twostroke.services.client.client import Client, Measured
from twostroke.services.client.cluster_client import ClusterClient
from twostroke.services.gateway.gateway import Gateway, load_model
from twostroke.services.gateway.security import door_credentials
from twostroke.services.grpc_setup import open_channel
from twostroke.services.security.api_keys import new_key
from twostroke.services.security.limits import Limits
from twostroke.services.security.tenant import Tenant
from twostroke.services.settings import GatewaySettings
from twostroke.services.supervisor.machine import free_ports
from twostroke.v1 import cluster_pb2, cluster_pb2_grpc
from twostroke.v1 import inference_pb2 as pb

from ..certificates import Authority
from ..cluster import Cluster, cluster, detail, refusal, retry_s, text_request, token_ids, until
from ..stand_in_worker import Script, StandIn

Metadata = tuple[tuple[str, str], ...]


class Keys:
    """A file of keys, and metadata by name."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.of: dict[str, str] = {}
        self.add("acme", max_requests=2)
        self.add("umbrella")
        self.add("ops", admin=True)

    def add(self, tenant: str, *, admin: bool = False, **limits: int) -> None:
        self.of[tenant], kept = new_key(tenant, admin=admin, limits=Limits(**limits))
        with self.path.open("a") as file:
            file.write(kept.line() + "\n")

    def __call__(self, tenant: str) -> Metadata:
        return (("authorization", f"Bearer {self.of[tenant]}"),)

    def access(self, tenant: str, **more: Any) -> Access:
        return Access(key=Secret(self.of[tenant]), **more)


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    return Keys(tmp_path / "keys.jsonl")


async def code(call: Any) -> str:
    """OK, or the status's name."""
    try:
        if hasattr(call, "__aiter__"):
            async for _ in call:
                pass
        else:
            await call
    except grpc.aio.AioRpcError as error:
        return error.code().name
    return "OK"


def calls(it: Cluster, metadata: Metadata | None) -> dict[str, Any]:
    """A call of each kind that a gateway answers."""
    more: dict[str, Any] = {"metadata": metadata, "timeout": 10}
    admin = cluster_pb2_grpc.ClusterStub(it.channel)
    reflection = reflection_pb2_grpc.ServerReflectionStub(it.channel)
    question = reflection_pb2.ServerReflectionRequest(list_services="")
    return {
        "generate": it.stub.Generate(text_request(max_tokens=1), **more),
        "tokenize": it.stub.Tokenize(pb.TokenizeRequest(input=pb.Input(text="x")), **more),
        "model": it.stub.GetModel(pb.GetModelRequest(), **more),
        "list": admin.ListWorkers(cluster_pb2.ListWorkersRequest(), **more),
        "drain": admin.Drain(cluster_pb2.DrainRequest(worker="b0"), **more),
        "role": admin.SetRole(cluster_pb2.SetRoleRequest(worker="b0", role=cluster_pb2.WORKER_ROLE_BOTH), **more),
        "reflection": reflection.ServerReflectionInfo(iter([question]), **more),
        "health": health_pb2_grpc.HealthStub(it.channel).Check(health_pb2.HealthCheckRequest(), **more),
        "unknown": it.channel.unary_unary("/twostroke.v1.Inference/None")(b"", **more),
        "nowhere": it.channel.unary_unary("/none.Such/None")(b"", **more),
    }


async def codes(it: Cluster, metadata: Metadata | None) -> dict[str, str]:
    return {name: await code(call) for name, call in calls(it, metadata).items()}


async def test_who_may_call_what(tiny_llama_dir: Path, keys: Keys) -> None:
    async with cluster(tiny_llama_dir, StandIn("both", "b0"), api_keys=keys.path) as it:
        await until(lambda: it.gateway.fleet.can_decode)
        nobody = await codes(it, None)
        assert nobody.pop("health") == "OK"
        assert set(nobody.values()) == {"UNAUTHENTICATED"}  # also for what does not exist
        assert await codes(it, (("authorization", "Bearer tsk_0"),)) == {**nobody, "health": "OK"}
        tenant = await codes(it, keys("acme"))
        assert {name for name, told in tenant.items() if told == "PERMISSION_DENIED"} == {"list", "drain", "role"}
        assert {name for name, told in tenant.items() if told == "UNIMPLEMENTED"} == {"unknown", "nowhere"}
        assert [tenant[name] for name in ("generate", "tokenize", "model", "reflection", "health")] == ["OK"] * 5
        admin = await codes(it, keys("ops"))
        assert admin == tenant | {"list": "OK", "drain": "OK", "role": "OK"}
        await it.idle()


async def test_without_keys_everything_is_open(tiny_llama_dir: Path) -> None:
    async with cluster(tiny_llama_dir, StandIn("both", "b0")) as it:
        told = await codes(it, None)
        assert {name for name, value in told.items() if value != "OK"} == {"unknown", "nowhere"}


async def test_refusals_are_rich_and_cost_nothing(tiny_llama_dir: Path, keys: Keys) -> None:
    worker = StandIn("both", "b0")
    async with cluster(tiny_llama_dir, worker, api_keys=keys.path) as it:
        from google.rpc import error_details_pb2

        for metadata, told in ((None, "no credentials: send"), ((("authorization", "Bearer x"),), "not valid")):
            error = await refusal(it.collect(text_request(), metadata=metadata))
            assert error.code() is grpc.StatusCode.UNAUTHENTICATED
            assert told in (error.details() or "")
            assert detail(error, error_details_pb2.ErrorInfo).reason == "UNAUTHENTICATED"
        large = pb.GenerateRequest(input=pb.Input(text="x" * (15 << 20)))
        assert (await refusal(it.collect(large))).code() is grpc.StatusCode.UNAUTHENTICATED
        assert not worker.submits


async def test_tenants_never_share_a_prefix(tiny_llama_dir: Path, keys: Keys) -> None:
    keys.add("acme", max_requests=2)
    worker = StandIn("both", "b0")
    async with cluster(tiny_llama_dir, worker, api_keys=keys.path) as it:
        for tenant in ("acme", "umbrella", "acme", "ops"):
            token_ids(await it.collect(text_request("the same"), metadata=keys(tenant)))
        salts = [submit.cache_salt for submit in worker.submits]
        assert salts[0] == salts[2]
        assert len(set(salts)) == 3
        assert all(len(salt) == 32 for salt in salts)
        await it.idle()
    async with cluster(tiny_llama_dir, worker) as it:
        await it.collect(text_request("the same"))
        assert worker.submits[-1].cache_salt == b""


async def test_a_tenant_s_requests_at_once_are_bounded(tiny_llama_dir: Path, keys: Keys) -> None:
    worker = StandIn("both", "b0", Script(mute_after=1))
    async with cluster(tiny_llama_dir, worker, api_keys=keys.path, tenant_requests=3) as it:
        held = [it.stub.Generate(text_request(), metadata=keys("acme")) for _ in range(2)]
        for call in held:
            await call.read()
        error = await refusal(it.collect(text_request(), metadata=keys("acme")))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "2 requests of tenant 'acme'" in (error.details() or "")
        assert retry_s(error) > 0
        others = [it.stub.Generate(text_request(n=3), metadata=keys("umbrella"))]
        await others[0].read()
        error = await refusal(it.collect(text_request(), metadata=keys("umbrella")))
        assert "'umbrella' are being served already, of 3" in (error.details() or "")
        held[0].cancel()
        await until(lambda: it.gateway.admission.inside == 4)
        again = it.stub.Generate(text_request(), metadata=keys("acme"))
        await again.read()
        for call in (*held, *others, again):
            call.cancel()
        await it.idle()
        assert not it.gateway.admission.ledger.inside(Tenant("acme"))


async def test_a_withdrawn_key_ends_with_its_next_call(
    tiny_llama_dir: Path, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("twostroke.services.security.watched_file.LOOK_S", 0.0)
    worker = StandIn("both", "b0", Script(mute_after=1))
    async with cluster(tiny_llama_dir, worker, api_keys=keys.path) as it:
        running = it.stub.Generate(text_request(), metadata=keys("acme"))
        await running.read()
        keys.path.write_text("".join(line for line in keys.path.open() if '"acme"' not in line))
        assert await code(it.stub.GetModel(pb.GetModelRequest(), metadata=keys("acme"))) == "UNAUTHENTICATED"
        assert await code(it.stub.GetModel(pb.GetModelRequest(), metadata=keys("umbrella"))) == "OK"
        assert not running.done()
        running.cancel()
        await it.idle()


async def test_our_clients_show_their_key(tiny_llama_dir: Path, keys: Keys) -> None:
    async with cluster(tiny_llama_dir, StandIn("both", "b0"), api_keys=keys.path) as it:
        async with Client(it.address, access=keys.access("acme")) as client:
            assert (await client.model()).model == "llama"
            pieces = [piece async for piece in client.generate(text_request(), 10, Measured())]
            assert token_ids(pieces)
        async with Client(it.address) as client:
            with pytest.raises(Unauthenticated, match="no credentials"):
                await client.model()
        async with ClusterClient(it.address, access=keys.access("ops")) as admin:
            assert [worker.name for worker in await admin.workers()] == ["b0"]
        async with ClusterClient(it.address, access=keys.access("acme")) as admin:
            with pytest.raises(PermissionDenied, match="admin"):
                await admin.drain("b0", True, 0)


async def test_neither_keys_nor_prompts_are_logged(
    tiny_llama_dir: Path, keys: Keys, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    wrong, _ = new_key("acme")
    async with cluster(tiny_llama_dir, StandIn("both", "b0"), api_keys=keys.path) as it:
        await it.collect(text_request("hush hush"), metadata=keys("acme"))
        await refusal(it.collect(text_request("hush hush"), metadata=(("authorization", f"Bearer {wrong}"),)))
        await refusal(it.collect(text_request("hush hush")))
    for secret in ("hush", "tsk_", keys.of["acme"], wrong):
        assert secret not in caplog.text
    assert "tsk_" not in repr(keys.access("acme"))


@asynccontextmanager
async def secured(model_dir: Path, *workers: StandIn, **settings: Any) -> AsyncIterator[tuple[Gateway, str]]:
    """A gateway whose own channel is the test's business."""
    addresses = [await worker.start() for worker in workers]
    chosen = GatewaySettings(model=str(model_dir), **{"listen": "localhost:0", "workers": addresses, **settings})
    gateway = Gateway(chosen, load_model(chosen))
    try:
        yield gateway, await gateway.start()
    finally:
        await gateway.stop()
        for worker in workers:
            await worker.stop()


async def test_mtls_and_keys_together(tiny_llama_dir: Path, tmp_path: Path, keys: Keys) -> None:
    ours = Authority(tmp_path, "ours")
    pair, client, stranger = ours.issue("localhost"), ours.issue("web"), ours.issue("stranger")
    tls = {"tls_cert": pair.cert, "tls_key": pair.key, "tls_client_ca": ours.path, "tls_client_names": ["web"]}
    worker = StandIn("both", "b0")
    async with secured(tiny_llama_dir, worker, **tls, api_keys=keys.path) as (gateway, address):
        await until(lambda: gateway.fleet.loads())
        whole = keys.access("acme", ca=ours.path, cert=client.cert, cert_key=client.key)
        async with Client(address, access=whole) as it:
            assert token_ids([piece async for piece in it.generate(text_request(), 10, Measured())])
        keyless = Access(ca=ours.path, cert=client.cert, cert_key=client.key)
        async with Client(address, access=keyless) as it:
            with pytest.raises(Unauthenticated):
                await it.model()
        named = keys.access("acme", ca=ours.path, cert=stranger.cert, cert_key=stranger.key)
        async with Client(address, access=named) as it:
            with pytest.raises(PermissionDenied, match="names"):
                await it.model()
        for short in (keys.access("acme"), keys.access("acme", ca=ours.path)):
            async with Client(address, access=short) as it:
                with pytest.raises(Exception, match="no gateway answers"):
                    await it.model()


async def listed(channel: grpc.aio.Channel, metadata: Metadata | None = None) -> set[str]:
    """The services that reflection tells of; empty where it is not served."""
    question = reflection_pb2.ServerReflectionRequest(list_services="")
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    try:
        answers = [a async for a in stub.ServerReflectionInfo(iter([question]), metadata=metadata, timeout=10)]
    except grpc.aio.AioRpcError as error:
        assert error.code() is grpc.StatusCode.UNIMPLEMENTED
        return set()
    return {service.name for service in answers[0].list_services_response.service}


async def test_reflection_can_be_shut_off(tiny_llama_dir: Path) -> None:
    async with cluster(tiny_llama_dir, StandIn("both", "b0")) as it:
        assert {"twostroke.v1.Inference", "twostroke.v1.Cluster"} <= await listed(it.channel)
    async with cluster(tiny_llama_dir, StandIn("both", "b0"), reflection=False) as it:
        assert not await listed(it.channel)


async def test_orders_and_reflection_move(tiny_llama_dir: Path, tmp_path: Path, keys: Keys) -> None:
    ours = Authority(tmp_path, "ours")
    pair = ours.issue("localhost")
    tls = {"tls_cert": pair.cert, "tls_key": pair.key}
    admin_listen = f"127.0.0.1:{free_ports(1)[0]}"
    more: dict[str, Any] = {**tls, "api_keys": keys.path, "admin_listen": admin_listen}
    async with secured(tiny_llama_dir, StandIn("both", "b0"), **more) as (gateway, address):
        await until(lambda: gateway.fleet.loads())
        public = keys.access("ops", ca=ours.path)
        async with ClusterClient(address, access=public) as admin:
            with pytest.raises(Exception, match=r"(?i)method not found"):
                await admin.workers()
        async with public.channel(address) as channel:
            assert not await listed(channel, keys("ops"))
        async with open_channel(admin_listen) as channel:  # this machine's own: plaintext, but a key all the same
            assert "twostroke.v1.Cluster" in await listed(channel, keys("ops"))
            health = health_pb2_grpc.HealthStub(channel)
            await until(lambda: gateway.fleet.can_decode)
            async with asyncio.timeout(10):
                while (await health.Check(health_pb2.HealthCheckRequest())).status != 1:
                    await asyncio.sleep(0.01)
        async with ClusterClient(admin_listen, access=keys.access("ops")) as admin:
            assert [worker.name for worker in await admin.workers()] == ["b0"]
        async with ClusterClient(admin_listen, access=keys.access("acme")) as admin:
            with pytest.raises(PermissionDenied):
                await admin.workers()
        await gateway.drain(0, asyncio.Event())
        async with open_channel(admin_listen) as channel:
            assert (await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())).status == 2


async def test_an_admin_port_in_use_is_an_error(tiny_llama_dir: Path) -> None:
    async with cluster(tiny_llama_dir, StandIn("both", "b0")) as it:
        with pytest.raises(ConfigError, match="admin_listen: cannot listen"):
            async with secured(tiny_llama_dir, admin_listen=it.address):
                pass


async def test_metadata_and_streams_of_a_connection_are_bounded(tiny_llama_dir: Path) -> None:
    limits = {"max_metadata_bytes": 4096, "max_streams": 2}
    worker = StandIn("both", "b0", Script(mute_after=1))
    async with cluster(tiny_llama_dir, worker, **limits) as it:
        assert await code(it.stub.GetModel(pb.GetModelRequest(), metadata=(("x", "y" * 3000),))) == "OK"
        assert await code(it.stub.GetModel(pb.GetModelRequest(), metadata=(("x", "y" * 5000),))) == "RESOURCE_EXHAUSTED"
        held = [it.stub.Generate(text_request()) for _ in range(2)]
        for call in held:
            await call.read()
        waits = it.stub.GetModel(pb.GetModelRequest(), timeout=0.3)
        assert await code(waits) == "DEADLINE_EXCEEDED"  # the client keeps it back
        async with open_channel(it.address) as other:
            assert await code(type(it.stub)(other).GetModel(pb.GetModelRequest())) == "OK"
        for call in held:
            call.cancel()
        await it.idle()


async def test_old_connections_take_no_calls_and_finish_theirs(tiny_llama_dir: Path) -> None:
    worker = StandIn("both", "b0", Script(pause_s=0.05))
    async with cluster(tiny_llama_dir, worker, connection_age_s=0.3) as it:
        tokens = token_ids(await it.collect(text_request()))  # 1.5 s, five times its age
        assert len(tokens) == 31
        for _ in range(3):  # over a connection that took its place
            assert await code(it.stub.GetModel(pb.GetModelRequest())) == "OK"
        await it.idle()


async def http(address: str, path: str, key: str = "") -> int:
    """The status of a GET."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    shown = f"authorization: Bearer {key}\r\n" if key else ""
    writer.write(f"GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n{shown}\r\n".encode())
    async with asyncio.timeout(10):
        line = await reader.readline()
    writer.close()
    return int(line.split()[1])


async def test_metrics_take_an_admin_and_can_be_moved_or_shut_off(tiny_llama_dir: Path, keys: Keys) -> None:
    place = f"127.0.0.1:{free_ports(1)[0]}"
    ops, acme = keys.of["ops"], keys.of["acme"]
    async with cluster(tiny_llama_dir, api_keys=keys.path) as it:
        told = [await http(it.gateway.http_address, "/metrics", key) for key in ("", acme, ops)]
        assert told == [401, 403, 200]
    async with cluster(tiny_llama_dir, api_keys=keys.path, metrics_listen=place) as it:
        assert await http(it.gateway.http_address, "/metrics", ops) == 404
        assert [await http(place, "/metrics", key) for key in ("", acme, ops)] == [401, 403, 200]
        assert [await http(place, path, ops) for path in ("/health", "/v1/models", "/")] == [503, 404, 404]
    async with cluster(tiny_llama_dir, metrics_listen=place, http_listen="off") as it:
        assert await http(place, "/metrics") == 200
    async with cluster(tiny_llama_dir, metrics=False, metrics_listen=place) as it:
        assert await http(it.gateway.http_address, "/metrics") == 404
        with pytest.raises(ConnectionRefusedError):
            await http(place, "/metrics")


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({"listen": "127.0.0.1:0"}, ()),
        ({"listen": "localhost:0"}, ()),
        ({"listen": "0.0.0.0:0"}, ("without TLS", "without authentication")),
        ({"listen": "127.0.0.1:0", "http_listen": "0.0.0.0:0"}, ("without TLS", "without authentication")),
        ({"listen": "0.0.0.0:0", "api_keys": True}, ("without TLS",)),
        ({"listen": "0.0.0.0:0", "tls": True}, ("without authentication",)),
        ({"listen": "[::]:0", "tls": True, "api_keys": True}, ()),
        ({"listen": "0.0.0.0:0", "mtls": True}, ()),
    ],
)
async def test_open_doors_are_warned_of(
    tiny_llama_dir: Path,
    tmp_path: Path,
    keys: Keys,
    caplog: pytest.LogCaptureFixture,
    settings: dict[str, Any],
    wanted: Sequence[str],
) -> None:
    ours = Authority(tmp_path, "ours")
    pair = ours.issue("localhost")
    chosen: dict[str, Any] = {name: settings[name] for name in ("listen", "http_listen") if name in settings}
    chosen |= {"api_keys": keys.path} if "api_keys" in settings else {}
    chosen |= {"tls_cert": pair.cert, "tls_key": pair.key} if {"tls", "mtls"} & settings.keys() else {}
    chosen |= {"tls_client_ca": ours.path} if "mtls" in settings else {}
    async with secured(tiny_llama_dir, **chosen):
        warned = [r.getMessage() for r in caplog.records if "other machines" in r.getMessage()]
    assert len(warned) == len(wanted)
    for text, line in zip(wanted, warned, strict=True):
        assert text in line
        assert "--" in line  # and what to do


def test_names_without_certificates_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"tls_client_ca: got nothing.*tls_client_names"):
        door_credentials(GatewaySettings(tls_client_names=["a"]))
