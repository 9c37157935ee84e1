"""Asks a process how it is, by gRPC's health service."""

from enum import Enum
from typing import Any

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc  # type: ignore[import-untyped]

from ..grpc_setup import OpenChannel, open_channel


class Condition(Enum):
    """What a process answered."""

    SERVING = "serving"
    NOT_SERVING = "not serving"  # it lives, but is not ready or drains
    SILENT = "silent"  # no answer in time


class HealthProbe:
    """A channel to one address, asked again and again; it finds a process that was started anew there."""

    def __init__(self, address: str, channel: OpenChannel = open_channel) -> None:
        """`channel`: opens one to an address."""
        self._channel = channel(address)
        self._stub: Any = health_pb2_grpc.HealthStub(self._channel)

    async def check(self, timeout_s: float, service: str = "") -> Condition:
        """One question, answered or given up within `timeout_s`. `service`: a full name; empty: the process."""
        try:
            answer = await self._stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            lives = error.code() in (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.UNIMPLEMENTED)
            return Condition.NOT_SERVING if lives else Condition.SILENT
        serving = answer.status == health_pb2.HealthCheckResponse.SERVING
        return Condition.SERVING if serving else Condition.NOT_SERVING

    async def close(self) -> None:
        """Closes the channel."""
        await self._channel.close()


async def check_once(
    address: str, timeout_s: float, service: str = "", channel: OpenChannel = open_channel
) -> Condition:
    """One question to host:port."""
    probe = HealthProbe(address, channel)
    try:
        return await probe.check(timeout_s, service)
    finally:
        await probe.close()
