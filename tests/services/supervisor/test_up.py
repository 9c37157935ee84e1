"""Which processes `up` makes, what it tells them, and what it refuses before it starts any."""

import os
import socket
import sys
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from twostroke.errors import ConfigError
from twostroke.services.cli import main
from twostroke.services.configure import load
from twostroke.services.describe import flag
from twostroke.services.options import given_flags
from twostroke.services.settings import GatewaySettings, UpSettings, WorkerSettings, split_address
from twostroke.services.supervisor.machine import cores
from twostroke.services.supervisor.up import Stack, gateway_joined, plan, reachable, roles
from twostroke.v1 import inference_pb2, inference_pb2_grpc

WORKER = WorkerSettings(role="both")


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("TWOSTROKE_"):
            monkeypatch.delenv(name)


def parsed(arguments: tuple[str, ...]) -> tuple[str, dict[str, object], Any]:
    """(command, flags, value of --parent) of a child's command line."""
    assert arguments[:3] == (sys.executable, "-m", "twostroke.services.cli")
    context = main.make_context("twostroke", list(arguments[3:]))
    name, command, rest = main.resolve_command(context, [*context._protected_args, *context.args])
    assert command is not None
    params = command.make_context(name, rest, parent=context).params
    params.pop("config")
    parent = params.pop("parent")
    return name or "", given_flags(params), parent


def settings_of(stack: Stack) -> tuple[GatewaySettings, list[WorkerSettings]]:
    """What the children will read from their command lines."""
    _, flags, _ = parsed(stack.gateway.arguments)
    workers = []
    for spec in stack.workers:
        role, worker_flags, parent = parsed(spec.arguments)
        assert parent == os.getpid()
        workers.append(load(WorkerSettings, {**worker_flags, "role": role}))
    return load(GatewaySettings, flags), workers


def free(port: int = 0) -> str:
    return f"127.0.0.1:{port}"


def test_a_stack() -> None:
    stack = plan(UpSettings(prefill=2, decode=3, both=1), GatewaySettings(listen=free(), max_queue=7), WORKER)
    gateway, workers = settings_of(stack)
    names = ["prefill-0", "prefill-1", "decode-0", "decode-1", "decode-2", "both-0"]
    assert [spec.name for spec in stack.workers] == [worker.name for worker in workers] == names
    assert [worker.role for worker in workers] == [name.split("-")[0] for name in names]
    assert gateway.workers == [worker.listen for worker in workers] == [spec.address for spec in stack.workers]
    assert (gateway.max_queue, gateway.listen) == (7, stack.gateway.address)
    addresses = [gateway.listen, *gateway.workers]
    assert len(set(addresses)) == 7
    assert all(20_000 <= split_address(address)[1] < 32_000 for address in addresses)
    assert {worker.threads for worker in workers} == {max(1, cores() // 6)}


def test_what_was_told_reaches_the_workers(tmp_path: Path) -> None:
    template = WorkerSettings(
        role="both", model="/a model", threads=5, page_size=64, kv_memory=1 << 22, prefix_cache=False, drain_s=7.5,
        silence_s=3, shm_dir=tmp_path, models_dir=tmp_path,
    )  # fmt: skip
    stack = plan(UpSettings(ready_s=9), GatewaySettings(listen=free(), drain_s=4, silence_s=2), template)
    gateway, workers = settings_of(stack)
    for role, worker in zip(("prefill", "decode"), workers, strict=True):
        wanted = template.model_copy(update={"role": role, "name": f"{role}-0", "listen": worker.listen})
        assert worker == wanted
    assert gateway.drain_s == 4
    limits = {(spec.drain_s, spec.silence_s, spec.ready_s) for spec in stack.workers}
    assert limits == {(7.5, 3, 9)}
    assert (stack.gateway.drain_s, stack.gateway.silence_s, stack.gateway.ready_s) == (4, 2, 9)


def test_children_read_no_variables_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWOSTROKE_MAX_BATCH", "3")
    monkeypatch.setenv("TWOSTROKE_CONFIG", "/some/file")
    monkeypatch.setenv("TWOSTROKE_SMOLLM2_WHEEL", "/some/wheel")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    stack = plan(UpSettings(), GatewaySettings(listen=free()), WORKER)
    for spec in (stack.gateway, *stack.workers):
        assert "TWOSTROKE_MAX_BATCH" not in spec.environment
        assert "TWOSTROKE_CONFIG" not in spec.environment
        assert spec.environment["TWOSTROKE_SMOLLM2_WHEEL"] == "/some/wheel"
        assert spec.environment["OMP_NUM_THREADS"] == "1"


def test_somebody_must_decode() -> None:
    with pytest.raises(ConfigError, match="decode: got 0, takes at least 1"):
        plan(UpSettings(prefill=2, decode=0), GatewaySettings(listen=free()), WORKER)
    assert roles(UpSettings(prefill=0, decode=0, both=2)) == [("both", "both-0"), ("both", "both-1")]


def test_an_address_in_use_is_named_before_anything_starts() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError) as caught:
            plan(UpSettings(), GatewaySettings(listen=free(port)), WORKER)
    assert caught.value.message.startswith(f"listen: got '127.0.0.1:{port}', takes an address that is free (address")
    assert "--listen 127.0.0.1:0" in caught.value.message


def test_where_http_is_served() -> None:
    """On port 8000, but where the gateway takes a free port, HTTP does too; a taken one is named before any start."""
    assert GatewaySettings().http_place == "127.0.0.1:8000"
    stack = plan(UpSettings(), GatewaySettings(listen=free()), WORKER)
    gateway, _ = settings_of(stack)
    assert 20_000 <= split_address(gateway.http_place)[1] < 32_000
    assert stack.gateway.http_url == f"http://{gateway.http_place}"
    off, _ = settings_of(plan(UpSettings(), GatewaySettings(listen=free(), http_listen="off"), WORKER))
    assert off.http_place == ""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        place = free(taken.getsockname()[1])
        with pytest.raises(ConfigError, match=r"http_listen: got .* takes an address that is free") as caught:
            plan(UpSettings(), GatewaySettings(listen=free(), http_listen=place), WORKER)
    assert caught.value.field == "http_listen"


def test_a_gateway_of_several_processes_tells_of_all_of_them_elsewhere() -> None:
    stack = plan(UpSettings(), GatewaySettings(listen=free(), processes=3), WORKER)
    gateway, _ = settings_of(stack)
    assert gateway.processes == 3
    assert parsed(stack.gateway.arguments)[1]["watch"] == stack.gateway.watch_address
    assert stack.gateway.watch_address not in ("", gateway.listen, gateway.http_place, *gateway.workers)
    alone = plan(UpSettings(), GatewaySettings(listen=free()), WORKER).gateway
    assert "--watch" not in alone.arguments
    assert not alone.watch_address


def test_wildcards_are_reached_on_loopback() -> None:
    assert reachable("0.0.0.0:5") == "127.0.0.1:5"
    assert reachable(":5") == "127.0.0.1:5"
    assert reachable("10.0.0.1:5") == "10.0.0.1:5"
    assert reachable("[::1]:5") == "[::1]:5"


def test_flags_are_made_of_names() -> None:
    assert flag("kv_memory") == "--kv-memory"


class Gateway(inference_pb2_grpc.InferenceServicer):
    """Meets a worker with each question."""

    def __init__(self) -> None:
        self.asked = 0

    async def GetModel(self, request: object, context: object) -> inference_pb2.GetModelResponse:  # noqa: N802
        self.asked += 1
        return inference_pb2.GetModelResponse(prefill_workers=min(self.asked, 2), decode_workers=min(self.asked, 3))


@pytest.mark.parametrize("known", [True, False])
async def test_serving_means_that_the_gateway_met_all(known: bool) -> None:
    server = grpc.aio.server()
    gateway = Gateway()
    if known:
        inference_pb2_grpc.add_InferenceServicer_to_server(gateway, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        await gateway_joined(f"127.0.0.1:{port}", UpSettings(prefill=2, decode=2, both=1))
    finally:
        await server.stop(0)
    assert gateway.asked == (3 if known else 0)
