"""Wraps what answers a path: who calls, which method, errors, figures. Nothing escapes to the server below."""

import logging
import traceback
from collections.abc import Awaitable, Callable, Mapping
from typing import TypeAlias

from ....errors import TwostrokeError
from ...security.tenant import ANYONE, Tenant, serve_as
from .bodies import Receive
from .errors import CLIENT_GONE, ClientGone, HttpRefusal, error_body, error_headers, kind_of
from .exchange import Exchange, Scope, Send
from .reply import DONE

Handler: TypeAlias = Callable[[Exchange], Awaitable[None]]
Authenticate: TypeAlias = Callable[[list[tuple[bytes, bytes]], str], Tenant]
"""Of headers and the peer's address: who calls."""
Count: TypeAlias = Callable[[str, int], None]
"""Is told the path's name and the status of each response."""

logger = logging.getLogger(__name__)


def no_check(_: list[tuple[bytes, bytes]], __: str) -> Tenant:
    """Everybody may."""
    return ANYONE


class Endpoint:
    """An ASGI application for one path."""

    def __init__(
        self,
        name: str,
        methods: Mapping[str, Handler],
        *,
        authenticate: Authenticate,
        count: Count,
        admin: bool = False,
        other: Handler | None = None,
    ) -> None:
        """`methods`: by method's name; `other`: for those that are not among them. `admin`: only for those who may give
        orders to the cluster."""
        self._name = name
        self._other = other
        self._methods = methods
        self._authenticate = authenticate
        self._count = count
        self._admin = admin

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers; a failure after the first event is told in-band."""
        exchange = Exchange(scope, receive, send)
        status: int | None = None
        try:
            await self._serve(exchange, scope["method"])
        except ClientGone:
            status = CLIENT_GONE
        except TwostrokeError as error:
            status = await self._refuse(exchange, error)
        except Exception as error:
            status = await self._refuse(exchange, self._unexpected(error))
        self._count(self._name, exchange.status if status is None else status)

    async def _serve(self, exchange: Exchange, method: str) -> None:
        exchange.name_request()
        tenant = self._authenticate(exchange.headers, exchange.peer)
        if self._admin:
            tenant.require_admin()
        serve_as(tenant)
        handler = self._methods.get(method, self._other)
        if handler is None:
            allowed = ", ".join(self._methods)
            raise HttpRefusal(
                f"{method} is not for this path, {allowed} is", status=405, code="method_not_allowed",
                headers=((b"allow", allowed.encode()),),
            )  # fmt: skip
        await handler(exchange)

    async def _refuse(self, exchange: Exchange, error: TwostrokeError) -> int:
        body = error_body(error, chat=exchange.chat, renamed=exchange.renamed)
        if exchange.begun:
            await exchange.cut(b"data: " + body + b"\n\n" + DONE)
        else:
            await exchange.respond(kind_of(error).status, body, error_headers(error))
        return kind_of(error).status

    def _unexpected(self, error: Exception) -> TwostrokeError:
        """Logs the place and the type, but not the message: it may quote a prompt."""
        stack = "".join(traceback.format_tb(error.__traceback__))
        logger.error("%s failed: %s at\n%s", self._name, type(error).__qualname__, stack)
        return TwostrokeError(f"internal error ({type(error).__name__})")
