"""Lets only those peers call whose certificate has one of the expected names."""

from collections.abc import Awaitable, Callable, Iterable

import grpc.aio

from ...errors import PermissionDenied
from ..incoming import Context
from ..interceptor import Handler, preceded

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
        return preceded(handler, self._check)

    def _check(self, context: Context) -> None:
        if not self._expected & names_of(context):
            raise PermissionDenied("the certificate's names are not among those that are expected here")
