"""Which gRPC services a gateway offers: all, or fewer; health and reflection tell of the same."""

from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from twostroke.oip import grpc_service_pb2 as pb
from twostroke.oip import grpc_service_pb2_grpc as rpc
from twostroke.services.gateway.doors import INFERENCE, OPEN_INFERENCE, door_names
from twostroke.services.settings import GatewaySettings

from ..cluster import cluster, refusal, text_request, token_ids, until
from ..stand_in_worker import StandIn


async def listed(channel: grpc.aio.Channel) -> set[str]:
    question = reflection_pb2.ServerReflectionRequest(list_services="")
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    answers = [answer async for answer in stub.ServerReflectionInfo(iter([question]), timeout=10)]
    return {service.name for service in answers[0].list_services_response.service}


@pytest.mark.parametrize("open_inference", [True, False])
async def test_the_open_inference_protocol_can_be_shut_off(tiny_llama_dir: Path, open_inference: bool) -> None:
    async with cluster(tiny_llama_dir, StandIn("both", "b0"), open_inference=open_inference) as it:
        await until(lambda: it.gateway._is_serving())
        health: Any = health_pb2_grpc.HealthStub(it.channel)
        ask = health_pb2.HealthCheckRequest(service=OPEN_INFERENCE)
        live = rpc.GRPCInferenceServiceStub(it.channel).ServerLive(pb.ServerLiveRequest())
        assert (OPEN_INFERENCE in await listed(it.channel)) is open_inference
        if open_inference:
            assert (await live).live
            assert (await health.Check(ask)).status == health_pb2.HealthCheckResponse.SERVING
        else:
            assert (await refusal(live)).code() is grpc.StatusCode.UNIMPLEMENTED
            assert (await refusal(health.Check(ask))).code() is grpc.StatusCode.NOT_FOUND
        assert INFERENCE in await listed(it.channel)
        assert token_ids(await it.collect(text_request()))


def test_names() -> None:
    assert {INFERENCE, OPEN_INFERENCE} == {"twostroke.v1.Inference", "inference.GRPCInferenceService"}
    assert {INFERENCE, OPEN_INFERENCE} <= set(door_names(GatewaySettings()))
    assert OPEN_INFERENCE not in door_names(GatewaySettings(open_inference=False))
