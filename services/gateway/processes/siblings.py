"""The other gateway processes on the same addresses: what must reach them is passed on over sockets of this machine.

They lie in a folder that only this user may enter. A process that is not there has nothing that a call could be about.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeAlias, TypeVar

import grpc.aio

from ....errors import ConfigError
from ....v1 import cluster_pb2 as pb
from ....v1 import cluster_pb2_grpc
from ...grpc_setup import Health, add_health_and_reflection, bind, create_server, open_channel
from ...security.tenant import Tenant
from ..board import Board, Cell
from ..fleet import Fleet
from ..vllm_engine.running import Names, Running
from .share import Share

ANSWER_S = 1.0  # a sibling that is frozen holds nobody up for longer

Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]
Answer = TypeVar("Answer")
logger = logging.getLogger(__name__)


class Siblings:
    """One loop owns it. `start`, `stop`. Without a share there are none."""

    def __init__(self, share: Share | None, board: Board, fleet: Fleet, names: Names | None = None) -> None:
        """`board`: says who is up. `names`: of requests, in all processes."""
        self.running = Running(names)  # of this process
        self._share = share
        self._board = board
        self._fleet = fleet
        self._server: grpc.aio.Server | None = None
        self._health: Health | None = None
        self._channels: dict[int, grpc.aio.Channel] = {}

    async def start(self) -> None:
        """Takes calls of the others. ConfigError where its socket cannot be had."""
        if self._share is None:
            return
        server = create_server()
        cluster_pb2_grpc.add_SiblingServicer_to_server(_Servicer(self.running, self._fleet), server)
        self._health = await add_health_and_reflection(server, (), reflect=False)
        address = self._share.socket(self._share.index)
        try:
            bind(server, address)
        except RuntimeError as error:
            raise ConfigError(f"share: cannot listen on {address}", field="share") from error
        await server.start()
        self._server = server
        self._board.tell(Cell.UP, 1)

    async def set_serving(self, serving: bool) -> None:
        """What whoever started this process is told."""
        if self._health is not None:
            await self._health.set_serving(serving)

    async def abort(self, tenant: Tenant, request_ids: Sequence[str]) -> None:
        """Ends those of these requests that are under way, here or in another process."""
        if self.running.abort(tenant, request_ids) < len(request_ids):
            request = pb.SiblingAbortRequest(tenant=tenant.name, request_ids=request_ids)
            await self._ask(lambda stub: stub.Abort(request, timeout=ANSWER_S, wait_for_ready=True))

    async def requests(self) -> Counter[str]:
        """Sequences of the others, by the address of the worker where they are."""
        message = pb.SiblingRequestsRequest()
        answers = await self._ask(lambda stub: stub.Requests(message, timeout=ANSWER_S, wait_for_ready=True))
        total: Counter[str] = Counter()
        for answer in answers:
            total.update(dict(answer.requests))
        return total

    async def stop(self) -> None:
        """Ends its calls at once. Idempotent."""
        self._board.tell(Cell.UP, 0)
        for channel in self._channels.values():
            await channel.close()
        self._channels.clear()
        if self._server is not None:
            await self._server.stop(None)
            self._server = None

    async def _ask(self, call: Callable[[Any], Awaitable[Answer]]) -> list[Answer]:
        """The answers of the others that are up; one that does not answer is left out."""
        share = self._share
        if share is None:
            return []
        others = [i for i in range(share.count) if i != share.index and self._board.of(i, Cell.UP)]
        answers = await asyncio.gather(*(self._ask_one(call, index) for index in others))
        return [answer for answer in answers if answer is not None]

    async def _ask_one(self, call: Callable[[Any], Awaitable[Answer]], index: int) -> Answer | None:
        try:
            return await call(cluster_pb2_grpc.SiblingStub(self._channel(index)))
        except grpc.aio.AioRpcError as error:
            logger.warning("gateway process %d did not answer: %s", index, error.code().name)
            return None

    def _channel(self, index: int) -> grpc.aio.Channel:
        if self._share is not None and index not in self._channels:
            self._channels[index] = open_channel(self._share.socket(index))
        return self._channels[index]


class _Servicer(cluster_pb2_grpc.SiblingServicer):
    """For the others."""

    def __init__(self, running: Running, fleet: Fleet) -> None:
        self._running = running
        self._fleet = fleet

    async def Abort(self, request: pb.SiblingAbortRequest, context: Context) -> pb.SiblingAbortResponse:  # noqa: N802
        """Of this process' requests."""
        found = self._running.abort(Tenant(request.tenant), request.request_ids)
        return pb.SiblingAbortResponse(found=found)

    async def Requests(  # noqa: N802
        self, request: pb.SiblingRequestsRequest, context: Context
    ) -> pb.SiblingRequestsResponse:
        """Of this process."""
        sessions = [(client.address, client.session) for client in self._fleet.clients]
        found = {address: session.waiting for address, session in sessions if session is not None}
        return pb.SiblingRequestsResponse(requests=found)
