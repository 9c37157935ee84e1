"""Authentication of every gRPC call of a gateway, before anything of its request is read; refused unless let in."""

from collections.abc import Awaitable, Callable
from typing import Any

import grpc.aio

from ...errors import TwostrokeError
from ..grpc_setup import HEALTH_SERVICE
from ..interceptor import Handler
from ..security.tenant import serve_as
from .auth import Authenticator


class AuthInterceptor(grpc.aio.ServerInterceptor):
    """Calls run under their tenant (`current_tenant`). Needs an `ErrorInterceptor` in front.

    Health answers everybody, as whoever probes has no key. What does not exist is refused like what does, so that
    nobody learns which services there are without a key.
    """

    def __init__(self, authenticator: Authenticator, *, admin_services: tuple[str, ...]) -> None:
        """`admin_services`: full names of services that take an admin's credentials."""
        self._authenticator = authenticator
        self._admin = tuple(f"/{name}/" for name in admin_services)
        self._open = f"/{HEALTH_SERVICE}/"

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        """Runs in the call's own task, whose tenant it sets."""
        method = handler_call_details.method
        if not method.startswith(self._open):
            try:
                tenant = self._authenticator.authenticate(handler_call_details.invocation_metadata or ())
                if method.startswith(self._admin):
                    tenant.require_admin()
            except TwostrokeError as error:
                return _refusing(error)
            serve_as(tenant)
        return await continuation(handler_call_details)


def _refusing(error: TwostrokeError) -> Handler:
    """Of calls of all kinds, as it reads nothing and answers nothing."""

    async def refuse(_: Any, __: Any) -> None:
        raise error

    return grpc.stream_stream_rpc_method_handler(refuse)
