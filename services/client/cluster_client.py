"""The client behind `twostroke workers`."""

import asyncio
import time
from collections.abc import Awaitable
from typing import TypeVar

import grpc.aio

from ...errors import (
    InvalidRequest,
    PermissionDenied,
    TwostrokeError,
    Unauthenticated,
    Unavailable,
    WorkerNotFound,
    WrongState,
)
from ...v1 import cluster_pb2 as pb
from ...v1 import cluster_pb2_grpc
from ..grpc_setup import connection_fault
from .access import OPEN, Access

CALL_S = 5.0
LOOK_S = 0.25  # between two looks whether a worker is back

T = TypeVar("T")
_ERRORS: dict[grpc.StatusCode, type[TwostrokeError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
    grpc.StatusCode.NOT_FOUND: WorkerNotFound,
    grpc.StatusCode.FAILED_PRECONDITION: WrongState,
    grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
    grpc.StatusCode.PERMISSION_DENIED: PermissionDenied,
}


class ClusterClient:
    """A gateway at host:port. Use as an async context manager."""

    def __init__(self, address: str, *, access: Access = OPEN) -> None:
        """`access`: how it is secured."""
        self._address = address
        self._metadata = access.metadata
        self._channel = access.channel(address)
        self._stub = cluster_pb2_grpc.ClusterStub(self._channel)

    async def __aenter__(self) -> "ClusterClient":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._channel.close()

    async def workers(self) -> list[pb.WorkerInfo]:
        """All of them, by address."""
        call = self._stub.ListWorkers(pb.ListWorkersRequest(), timeout=CALL_S, metadata=self._metadata)
        return list((await self._ask(call)).workers)

    async def drain(self, worker: str, on: bool, within_s: float) -> pb.WorkerInfo:
        """The worker as it was before the order."""
        request = pb.DrainRequest(worker=worker, drain=on, within_ms=round(within_s * 1000))
        return (await self._ask(self._stub.Drain(request, timeout=CALL_S, metadata=self._metadata))).worker

    async def become(self, worker: str, role: pb.WorkerRole.ValueType, force: bool, wait_s: float) -> pb.WorkerInfo:
        """Orders a role; with `wait_s`, returns once the worker is back in it. Unavailable where it does not come."""
        request = pb.SetRoleRequest(worker=worker, role=role, force=force)
        before = (await self._ask(self._stub.SetRole(request, timeout=CALL_S, metadata=self._metadata))).worker
        until = time.monotonic() + wait_s
        while wait_s > 0 and before.role != role:
            now = next((w for w in await self.workers() if w.address == before.address), before)
            if now.state == pb.WORKER_STATE_READY and now.role == role and now.incarnation != before.incarnation:
                return now
            if time.monotonic() >= until:
                raise Unavailable(f"{before.name} is not back after {wait_s:g} s: {now.reason or 'it still drains'}")
            await asyncio.sleep(LOOK_S)
        return before

    async def _ask(self, call: Awaitable[T]) -> T:
        try:
            return await call
        except grpc.aio.AioRpcError as error:
            details = error.details() or "no details"
            if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                raise Unavailable(
                    f"no gateway answers at {self._address}: name another with --address ({connection_fault(details)})"
                ) from error
            raise _ERRORS.get(error.code(), TwostrokeError)(details) from error
