"""The engine door: thin, it converts. All of it runs on the lifecycle that the other doors run on."""

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, TypeAlias

import grpc.aio

from ....errors import InvalidRequest, Unsupported
from ....smg import common_pb2, vllm_engine_pb2_grpc
from ....smg import vllm_engine_pb2 as pb
from ...security.tenant import Tenant, current_tenant
from ..served_model import ServedModel
from .about import ModelFacts, ServerFacts, model_info
from .generate import Context, Generate
from .kv_events import Context as KvContext
from .kv_events import KvEvents
from .tokenizer_files import TokenizerFiles

SERVICE = pb.DESCRIPTOR.services_by_name["VllmEngine"].full_name
MAX_ABORTED = 4096  # ids in one Abort

AnyContext: TypeAlias = grpc.aio.ServicerContext[Any, Any]
Abort: TypeAlias = Callable[[Tenant, Sequence[str]], Awaitable[None]]
Loads: TypeAlias = Callable[[pb.GetLoadsRequest], pb.GetLoadsResponse]


class VllmEngineServicer(vllm_engine_pb2_grpc.VllmEngineServicer):
    """Needs an `ErrorInterceptor` on its server."""

    def __init__(
        self,
        generate: Generate,
        abort: Abort,
        model: ServedModel,
        facts: ModelFacts,
        server: ServerFacts,
        loads: Loads,
        tokenizer: TokenizerFiles,
        kv_events: KvEvents,
    ) -> None:
        self._generate = generate
        self._abort = abort
        self._model = model
        self._facts = facts
        self._server = server
        self._loads = loads
        self._tokenizer = tokenizer
        self._kv_events = kv_events

    async def Generate(  # type: ignore[override]  # noqa: N802 - a coroutine that writes, where stubs want a generator
        self, request: pb.GenerateRequest, context: Context
    ) -> None:
        """See `Generate.run`."""
        self._server.received()
        await self._generate.run(request, context)

    async def Abort(self, request: pb.AbortRequest, context: AnyContext) -> pb.AbortResponse:  # noqa: N802
        """Of the caller's own requests, in whichever process they are. The streams end by themselves."""
        if len(request.request_ids) > MAX_ABORTED:
            raise InvalidRequest(f"{len(request.request_ids)} request ids, at most {MAX_ABORTED}", field="request_ids")
        await self._abort(current_tenant(), request.request_ids)
        return pb.AbortResponse()

    async def HealthCheck(  # noqa: N802
        self, request: pb.HealthCheckRequest, context: AnyContext
    ) -> pb.HealthCheckResponse:
        """As gRPC's own health service tells it, with the reason."""
        return self._server.health()

    async def GetModelInfo(  # noqa: N802
        self, request: pb.GetModelInfoRequest, context: AnyContext
    ) -> pb.GetModelInfoResponse:
        """The model."""
        return model_info(self._model, self._facts)

    async def GetServerInfo(  # noqa: N802
        self, request: pb.GetServerInfoRequest, context: AnyContext
    ) -> pb.GetServerInfoResponse:
        """The gateway."""
        return self._server.info()

    async def GetLoads(self, request: pb.GetLoadsRequest, context: AnyContext) -> pb.GetLoadsResponse:  # noqa: N802
        """The workers."""
        return self._loads(request)

    async def GetTokenizer(  # noqa: N802
        self, request: common_pb2.GetTokenizerRequest, context: AnyContext
    ) -> AsyncIterator[common_pb2.GetTokenizerChunk]:
        """The tokenizer's files."""
        for chunk in await self._tokenizer.chunks():
            yield chunk

    async def SubscribeKvEvents(  # type: ignore[override]  # noqa: N802
        self, request: common_pb2.SubscribeKvEventsRequest, context: KvContext
    ) -> None:
        """See `KvEvents.run`. Whatever the subscriber had before, it begins with all that there is."""
        await self._kv_events.run(context)

    async def Embed(self, request: pb.EmbedRequest, context: AnyContext) -> pb.EmbedResponse:  # noqa: N802
        """Never."""
        raise Unsupported("this model generates text; it embeds none")

    async def FlushCache(  # noqa: N802
        self, request: common_pb2.FlushCacheRequest, context: AnyContext
    ) -> common_pb2.FlushCacheResponse:
        """Never."""
        raise Unsupported("prefix caches are not emptied on demand: a cache salt keeps requests apart")

    async def StartProfile(  # noqa: N802
        self, request: common_pb2.StartProfileRequest, context: AnyContext
    ) -> common_pb2.ProfileResponse:
        """Never."""
        raise Unsupported("workers are not profiled through the gateway")

    async def StopProfile(  # noqa: N802
        self, request: common_pb2.StopProfileRequest, context: AnyContext
    ) -> common_pb2.ProfileResponse:
        """Never."""
        raise Unsupported("workers are not profiled through the gateway")
