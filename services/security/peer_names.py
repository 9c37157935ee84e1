"""Lets only those peers call whose certificate has one of the expected names."""

import inspect
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, TypeAlias

import grpc.aio

from ...errors import PermissionDenied

Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any] | None"
_NAMES = ("x509_subject_alternative_name", "x509_common_name")


def names_of(context: Context) -> set[str]:
    """All names in the certificate that the peer showed; empty where it showed none."""
    told = context.auth_context() or {}
    return {bytes(value).decode("utf-8", "replace") for key in _NAMES for value in told.get(key, ())}


class PeerNames(grpc.aio.ServerInterceptor):
    """Needs a listener that requires certificates, and an `ErrorInterceptor` in front."""

    def __init__(self, expected: Iterable[str]) -> None:
        self._expected: frozenset[str] = frozenset(expected)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        """Puts the look at the certificate before the handler: only the call's context knows it."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        kind = "_".join("stream" if s else "unary" for s in (handler.request_streaming, handler.response_streaming))
        behaviour: Callable[[Any, Context], Any] = getattr(handler, kind)
        build: Callable[..., Handler] = getattr(grpc, f"{kind}_rpc_method_handler")
        return build(
            self._checked(behaviour, streams_out=bool(handler.response_streaming)),
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )

    def _checked(self, behaviour: Callable[[Any, Context], Any], *, streams_out: bool) -> Callable[..., Any]:
        async def call(request: Any, context: Context) -> Any:
            self._check(context)
            return await behaviour(request, context)

        async def pump(request: Any, context: Context) -> Any:
            self._check(context)
            async for answer in behaviour(request, context):
                yield answer

        return pump if streams_out and inspect.isasyncgenfunction(behaviour) else call

    def _check(self, context: Context) -> None:
        if not self._expected & names_of(context):
            raise PermissionDenied("the certificate's names are not among those that are expected here")
