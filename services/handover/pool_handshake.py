"""How a prefill worker says hello on a link, and comes to a decode worker's pool by it."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any, TypeAlias

import grpc.aio

from ...errors import Mismatch, Unavailable
from ...v1 import worker_pb2 as pb
from ..identity import ProcessIdentity
from .pool_opener import Broken, Opened, PoolOpener
from .wire_link import PoolOffer, read_export

LinkContext: TypeAlias = grpc.aio.ServicerContext[Any, Any]


class PoolHandshake:
    """What a link's beginning needs of this worker."""

    def __init__(self, identity: ProcessIdentity, form: pb.ModelFormat, opener: PoolOpener, silence_s: float) -> None:
        """`silence_s`: how long each message of the peer may take."""
        self._identity = identity
        self._form = form
        self._opener = opener
        self._silence_s = silence_s

    async def hello(self, context: LinkContext, transport: str, *, wants_export: bool = False) -> None:
        """Our first message."""
        hello = pb.PrefillHello(
            identity=self._identity.message(), format=self._form, transport=transport, wants_export=wants_export
        )
        await context.write(pb.FromPrefill(hello=hello))

    async def reach(
        self,
        incarnation: int,
        offer: PoolOffer,
        broken: Broken,
        requests: AsyncIterator[pb.FromDecode],
        context: LinkContext,
    ) -> Opened:
        """Opens the peer's pool and says hello; by an export that the peer makes for us where one is needed.

        Raises Mismatch, Unavailable.
        """
        opened = await asyncio.to_thread(self._opener.open, offer, incarnation, broken)
        if isinstance(opened, Opened):
            try:
                await self.hello(context, opened.transport.kind)
            except BaseException:
                opened.transport.close()
                raise
            return opened
        await self.hello(context, opened, wants_export=True)
        export = (await expect(requests, "export", self._silence_s)).export
        way = read_export(export, offer, opened)
        return await asyncio.to_thread(self._opener.open_export, way, incarnation, broken)


async def expect(requests: AsyncIterator[pb.FromDecode], kind: str, within_s: float) -> pb.FromDecode:
    """The next message, which must be of this kind and come soon."""
    try:
        async with asyncio.timeout(within_s):
            message = await anext(requests)
    except TimeoutError:
        raise Unavailable(f"no {kind} came within {within_s:g} s") from None
    except StopAsyncIteration:
        raise Unavailable(f"the link ended before its {kind}") from None
    if message.WhichOneof("kind") != kind:
        raise Mismatch(f"expected {kind}, got {message.WhichOneof('kind')}")
    return message
