"""Lets only those peers call whose certificate has one of the expected names."""

import inspect
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from typing import Any

import grpc.aio

from ...errors import PermissionDenied
from ..interceptor import Behaviour, Context, Handler, rewrapped

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
        wrap = partial(self._checked, streams_out=bool(handler.response_streaming))
        return rewrapped(handler, wrap, handler.request_deserializer)

    def _checked(self, behaviour: Behaviour, *, streams_out: bool) -> Behaviour:
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
