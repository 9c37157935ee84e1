"""Every error of every gRPC door carries its details in `grpc-status-details-bin`, whatever the status."""

from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from twostroke.oip import grpc_service_pb2 as oip_pb
from twostroke.oip import grpc_service_pb2_grpc as oip_rpc
from twostroke.services.security.api_keys import new_key
from twostroke.smg import vllm_engine_pb2 as engine_pb
from twostroke.smg import vllm_engine_pb2_grpc as engine_rpc
from twostroke.v1 import cluster_pb2, cluster_pb2_grpc

from ..cluster import Cluster, cluster, detail, field_of, refusal, retry_s, text_request, until
from ..oip_client import infer
from ..stand_in_worker import Script, StandIn

Code = grpc.StatusCode


async def ended(call: Any) -> None:
    """Reads a call of any kind to its end."""
    if hasattr(call, "__aiter__"):
        async for _ in call:
            pass
    else:
        await call


def generating(it: Cluster, metadata: Any = None) -> dict[str, Any]:
    """A call of each door that generates."""
    tokens = engine_pb.TokenizedInput(input_ids=[5, 6, 7])
    return {
        "native": it.stub.Generate(text_request(), metadata=metadata),
        "open inference": oip_rpc.GRPCInferenceServiceStub(it.channel).ModelInfer(infer(), metadata=metadata),
        "engine": engine_rpc.VllmEngineStub(it.channel).Generate(
            engine_pb.GenerateRequest(tokenized=tokens, stream=True), metadata=metadata
        ),
    }


def check(error: grpc.aio.AioRpcError, code: grpc.StatusCode, reason: str) -> None:
    """The rich status says what the plain one does."""
    status: status_pb2.Status | None = rpc_status.from_call(error)  # type: ignore[arg-type]
    assert status is not None, error
    assert (error.code(), status.code, status.message) == (code, code.value[0], error.details())
    info = detail(error, error_details_pb2.ErrorInfo)
    assert (info.reason, info.domain) == (reason, "twostroke")


async def test_a_full_queue_says_when_to_come_back_at_every_door(tiny_llama_dir: Path) -> None:
    async with cluster(tiny_llama_dir, StandIn("both", "b0", Script(mute_after=0)), max_queue=1) as it:
        held = it.stub.Generate(text_request())
        await until(lambda: it.gateway.admission.inside == 1)
        for door, call in generating(it).items():
            error = await refusal(ended(call))
            check(error, Code.RESOURCE_EXHAUSTED, "OVERLOADED")
            assert 0.1 <= retry_s(error) <= 60, door
        held.cancel()
        await it.idle()


async def test_a_drain_says_when_to_come_back_at_every_door(tiny_llama_dir: Path) -> None:
    async with cluster(tiny_llama_dir, StandIn("both", "b0")) as it:
        it.gateway.admission.close()
        for call in generating(it).values():
            error = await refusal(ended(call))
            check(error, Code.UNAVAILABLE, "UNAVAILABLE")
            assert retry_s(error) > 0


@pytest.mark.parametrize("credentials", [None, "wrong", "umbrella"])
async def test_whoever_may_not_is_told_richly(tiny_llama_dir: Path, tmp_path: Path, credentials: str | None) -> None:
    path = tmp_path / "keys"
    key, kept = new_key("umbrella")
    path.write_text(kept.line())
    bearer = key if credentials == "umbrella" else credentials
    metadata = (("authorization", f"Bearer {bearer}"),) if bearer else None
    async with cluster(tiny_llama_dir, StandIn("both", "b0"), api_keys=path) as it:
        admin = cluster_pb2_grpc.ClusterStub(it.channel)
        orders = admin.ListWorkers(cluster_pb2.ListWorkersRequest(), metadata=metadata)
        if credentials == "umbrella":
            check(await refusal(orders), Code.PERMISSION_DENIED, "PERMISSION_DENIED")
            return
        for call in (*generating(it, metadata).values(), orders):
            check(await refusal(ended(call)), Code.UNAUTHENTICATED, "UNAUTHENTICATED")


async def test_other_errors(tiny_llama_dir: Path) -> None:
    async with cluster(tiny_llama_dir) as it:
        admin = cluster_pb2_grpc.ClusterStub(it.channel)
        check(await refusal(admin.Drain(cluster_pb2.DrainRequest(worker="x"))), Code.NOT_FOUND, "WORKER_NOT_FOUND")
        error = await refusal(it.collect(text_request(n=99)))
        check(error, Code.INVALID_ARGUMENT, "INVALID_REQUEST")
        assert field_of(error) == "n"
        check(await refusal(it.collect(text_request(model="x"))), Code.NOT_FOUND, "MODEL_NOT_FOUND")
        error = await refusal(it.collect(text_request()))
        check(error, Code.UNAVAILABLE, "UNAVAILABLE")
        assert retry_s(error) > 0
        stub = oip_rpc.GRPCInferenceServiceStub(it.channel)
        check(
            await refusal(stub.ModelMetadata(oip_pb.ModelMetadataRequest(name="x"))), Code.NOT_FOUND, "MODEL_NOT_FOUND"
        )
        garbage = it.channel.unary_stream("/twostroke.v1.Inference/Generate")(b"\xff\xff\xff")
        check(await refusal(ended(garbage)), Code.INVALID_ARGUMENT, "INVALID_REQUEST")
