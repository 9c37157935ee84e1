"""Authentication of every gRPC call of a gateway, before anything of its request is read; refused unless let in."""

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import grpc.aio

from ...errors import TwostrokeError
from ..grpc_setup import HEALTH_SERVICE
from ..incoming import Context
from ..interceptor import Handler, preceded
from ..security.tenant import serve_as
from .auth import Authenticator, Caller


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
        if method.startswith(self._open):
            return await continuation(handler_call_details)
        caller = self._authenticator.identify(handler_call_details.invocation_metadata or ())
        try:
            if caller.tenant is not None and method.startswith(self._admin):
                caller.tenant.require_admin()
        except TwostrokeError as error:
            caller = replace(caller, tenant=None, error=error)
        if caller.tenant is None:
            return self._refusing(caller)
        serve_as(caller.tenant)
        handler = await continuation(handler_call_details)
        if handler is None or self._authenticator.wrong.proven(caller.credentials):
            return handler
        return preceded(handler, lambda context: self._admit(caller, context))

    def _refusing(self, caller: Caller) -> Handler:
        """Of calls of all kinds, as it reads nothing and answers nothing."""

        async def refuse(_: Any, context: Context) -> None:
            self._admit(caller, context)

        return grpc.stream_stream_rpc_method_handler(refuse)

    def _admit(self, caller: Caller, context: Context) -> None:
        """Only the call's context knows the peer."""
        self._authenticator.admit(caller, context.peer() or "")
