"""The cluster API on gRPC: lists workers and passes orders on to them."""

from collections.abc import Awaitable
from typing import Any, TypeAlias

import grpc.aio

from ...engine.page_waste import suited_page_size
from ...errors import InvalidRequest, WorkerNotFound, WrongState
from ...v1 import cluster_pb2 as pb
from ...v1 import cluster_pb2_grpc
from .fleet import Fleet
from .processes.siblings import Siblings
from .router import Role
from .worker_client import WorkerClient
from .worker_session import MAX_PAIRS

MAX_WITHIN_S = 86_400.0

Context: TypeAlias = grpc.aio.ServicerContext[Any, Awaitable[Any]]


class ClusterServicer(cluster_pb2_grpc.ClusterServicer):
    """Thin: the fleet knows. Needs an `ErrorInterceptor` on its server."""

    def __init__(self, fleet: Fleet, siblings: Siblings | None = None) -> None:
        """`siblings`: what they have at the workers is told too."""
        self._fleet = fleet
        self._siblings = siblings

    async def ListWorkers(  # noqa: N802 - gRPC's name
        self, request: pb.ListWorkersRequest, context: Context
    ) -> pb.ListWorkersResponse:
        """All that are configured or found by name."""
        clients = sorted(self._fleet.clients, key=lambda client: client.address)
        workers = [info(client) for client in clients]
        theirs = await self._siblings.requests() if self._siblings is not None else {}
        for worker in workers:
            worker.requests += theirs.get(worker.address, 0)
        return pb.ListWorkersResponse(workers=workers)

    async def Drain(self, request: pb.DrainRequest, context: Context) -> pb.DrainResponse:  # noqa: N802
        """Passes the order on."""
        within_s = request.within_ms / 1000
        if within_s > MAX_WITHIN_S:
            raise InvalidRequest(f"within_ms is over {MAX_WITHIN_S * 1000:.0f}", field="within_ms")
        client = self._find(request.worker)
        before = info(client)
        if client.session is not None:
            client.session.hold(request.drain, within_s)
        return pb.DrainResponse(worker=before)

    async def SetRole(self, request: pb.SetRoleRequest, context: Context) -> pb.SetRoleResponse:  # noqa: N802
        """Passes the order on, unless nobody would decode any more."""
        try:
            role = Role(request.role)
        except ValueError:
            raise InvalidRequest(f"role {request.role} is unknown", field="role") from None
        client = self._find(request.worker)
        before = info(client)
        if not request.force and role is Role.PREFILL and not self._others_decode(client):
            raise WrongState(f"{client.name} is the only worker that decodes: no request could be served without it")
        if client.session is not None:
            client.session.become(role)
        return pb.SetRoleResponse(worker=before)

    def _others_decode(self, client: WorkerClient) -> bool:
        mine = client.session.incarnation if client.session is not None else 0
        loads = self._fleet.loads()
        return any(load.role is not Role.PREFILL and load.incarnation != mine for load in loads)

    def _find(self, worker: str) -> WorkerClient:
        """The connected worker of this name or address."""
        connected = [client for client in self._fleet.clients if client.session is not None]
        at = [client for client in connected if client.address == worker]
        found = at or [client for client in connected if client.name == worker]
        if not found:
            known = ", ".join(sorted(client.name for client in connected)) or "none"
            raise WorkerNotFound(f"no worker {worker[:128]!r} is connected; those that are: {known}")
        if len(found) > 1:
            places = ", ".join(client.address for client in found)
            raise InvalidRequest(f"{worker[:128]!r} names several workers: {places}", field="worker")
        return found[0]


def info(client: WorkerClient) -> pb.WorkerInfo:
    """What is known of a worker."""
    role = pb.WorkerRole.ValueType(client.role or 0)
    session = client.session
    if session is None:
        return pb.WorkerInfo(
            address=client.address, name=client.name, role=role, state=pb.WORKER_STATE_ABSENT, reason=client.reason
        )
    load, status = session.load, session.status
    return pb.WorkerInfo(
        address=client.address,
        name=client.name,
        role=role,
        state=pb.WORKER_STATE_DRAINING if load.draining else pb.WORKER_STATE_READY,
        incarnation=session.incarnation,
        pages=load.pages,
        free_pages=load.free_pages,
        cached_pages=len(session.cached),
        running=status.running,
        waiting=status.waiting,
        waiting_tokens=load.waiting_tokens,
        requests=session.waiting,
        prefilled_tokens=status.prefilled_tokens,
        pushed_pages=status.pushed_pages,
        tickets=status.tickets,
        page_size=load.page_size,
        unused_share=status.unused_positions / status.covered_positions if status.covered_positions else 0.0,
        mean_length=status.mean_length,
        suited_page_size=suited_page_size(status.mean_length),
        start_seconds=session.start_seconds,
        memory_bytes=session.memory_bytes,
        transports=[
            pb.PairTransport(decode_incarnation=pair.reader, transport=pair.transport, gb_per_s=pair.gb_per_s)
            for pair in status.pairs[:MAX_PAIRS]
        ],
    )
