"""The port for an LLM router alone: no key, a tenant of its own; the other doors ask for keys as ever."""

from pathlib import Path

import grpc.aio
import pytest

from twostroke.errors import ConfigError
from twostroke.services.gateway.gateway import Gateway, load_model
from twostroke.services.grpc_setup import open_channel
from twostroke.services.security.api_keys import new_key
from twostroke.services.security.limits import Limits
from twostroke.services.security.tenant import Tenant
from twostroke.services.settings import GatewaySettings
from twostroke.smg import vllm_engine_pb2 as pb
from twostroke.smg.vllm_engine_pb2_grpc import VllmEngineStub
from twostroke.v1 import inference_pb2, inference_pb2_grpc

from ...raw_http2 import connected
from ..cluster import refusal, until
from ..stand_in_worker import Script, StandIn
from .vllm_engine.engine_client import ends, engine, request

Code = grpc.StatusCode
FREE = "127.0.0.1:0"


def keys(tmp_path: Path, **limits: int) -> tuple[Path, str]:
    """A file with the router's limits, and another tenant's key."""
    (_, router), (key, other) = new_key("router", limits=Limits(**limits)), new_key("acme")
    file = tmp_path / "keys"
    file.write_text(router.line() + "\n" + other.line() + "\n")
    return file, key


async def test_a_router_needs_no_key_there_and_everybody_else_does(tiny_llama_dir: Path, tmp_path: Path) -> None:
    file, key = keys(tmp_path, max_requests=1)
    p0, d0 = StandIn("prefill", "p0"), StandIn("decode", "d0", Script(mute_after=2))
    async with engine(tiny_llama_dir, p0, d0, api_keys=file, engine_listen=FREE) as it:
        who = (("authorization", f"Bearer {key}"),)
        port = it.it.gateway.engine.address
        assert port != it.it.address
        async with open_channel(port) as channel:
            stub = VllmEngineStub(channel)
            assert (await stub.GetModelInfo(pb.GetModelInfoRequest())).served_model_name == "llama"
            call = stub.Generate(request("mine"), metadata=(("authorization", "Bearer nonsense"),))
            await call.read()
            assert d0.submits[0].cache_salt == Tenant("router").cache_salt()
            # Its tenant's limits are those of the file.
            error = await refusal(stub.Generate(request("more")).read())
            assert (error.code(), "'router'" in (error.details() or "")) == (Code.RESOURCE_EXHAUSTED, True)
            # Only the engine protocol is there.
            native = inference_pb2_grpc.InferenceStub(channel)
            assert (await refusal(native.GetModel(inference_pb2.GetModelRequest()))).code() is Code.UNIMPLEMENTED
            # Nobody else can name its requests, or finds this door at the other port.
            error = await refusal(it.abort("mine", metadata=who))
            assert error.code() is Code.UNIMPLEMENTED
            await stub.Abort(pb.AbortRequest(request_ids=["mine"]))
            messages = []
            while (message := await call.read()) is not grpc.aio.EOF:
                messages.append(message)
            assert ends(messages)[0].finish_reason == "abort"
        model = inference_pb2.GetModelRequest()
        assert (await refusal(it.it.stub.GetModel(model))).code() is Code.UNAUTHENTICATED
        assert (await it.it.stub.GetModel(model, metadata=who)).model == "llama"


async def test_all_clients_of_a_router_share_its_connection(tiny_llama_dir: Path) -> None:
    async with (
        engine(tiny_llama_dir, StandIn("both", "b0"), engine_listen=FREE, max_streams=2, max_calls=50) as it,
        connected(it.it.address) as client,
        connected(it.it.gateway.engine.address) as router,
    ):
        await until(lambda: (client.most_calls, router.most_calls) == (2, 50))


async def test_one_that_is_shut_off_or_in_use(tiny_llama_dir: Path) -> None:
    async with engine(tiny_llama_dir, StandIn("both", "b0"), engine_listen=FREE, vllm_engine=False) as it:
        assert it.it.gateway.engine.address == ""
        taken = GatewaySettings(model=str(tiny_llama_dir), listen=FREE, http_listen="off", engine_listen=it.it.address)
        other = Gateway(taken, load_model(taken))
        with pytest.raises(ConfigError, match="engine_listen: cannot listen") as caught:
            await other.start()
        await other.stop()
    assert caught.value.field == "engine_listen"


def test_a_tenant_s_name() -> None:
    with pytest.raises(ValueError, match="engine_tenant"):
        GatewaySettings(engine_tenant="a b")
