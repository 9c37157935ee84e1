"""One request and its response, as the endpoints see them: ASGI's messages, bounded."""

import asyncio
import math
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeAlias

from pydantic_core import from_json

from ..validation import MAX_REQUEST_ID
from .bodies import Bodies, Message, Receive
from .connection import CUT
from .errors import ClientGone, HttpRefusal
from .json_work import too_much_work

Scope: TypeAlias = Any
Send: TypeAlias = Callable[[Message], Awaitable[None]]

_COMMENT = b": keep-alive\n\n"  # proxies end a stream that looks dead
_EVENTS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would keep events back
]
_JSON = "application/json"


class Exchange:
    """`begun`: the status is sent, so that errors can be told in-band only."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.begun = False
        self.status = 0  # that was sent; 0: none
        self.arrival = time.monotonic()
        self.headers: list[tuple[bytes, bytes]] = list(scope["headers"])
        self.peer: str = (scope.get("client") or ("",))[0]  # its address
        self.params: dict[str, Any] = scope.get("path_params", {})
        self.request_id = ""
        self.chat = False
        self.renamed: dict[str, str] = {}  # what this client calls fields of the gateway
        self._cut: Callable[[bytes], None] | None = scope.get("extensions", {}).get(CUT)
        self._receive = receive
        self._send = send
        self._spoke = self.arrival

    def header(self, name: bytes) -> str:
        """The first one of this name (in lower case), or empty."""
        return next((value.decode("latin-1") for key, value in self.headers if key == name), "")

    def name_request(self) -> None:
        """Takes the client's `x-request-id`, or draws one. HttpRefusal for one that cannot go into logs and headers."""
        wanted = self.header(b"x-request-id")
        if len(wanted) > MAX_REQUEST_ID or not (wanted.isascii() and wanted.isprintable()):
            raise HttpRefusal(f"x-request-id takes up to {MAX_REQUEST_ID} printable characters", field="x-request-id")
        self.request_id = wanted or secrets.token_hex(8)

    def deadline(self) -> float | None:
        """By `time.monotonic()`, of the client's `x-request-timeout` in seconds; None without one."""
        text = self.header(b"x-request-timeout")
        if not text:
            return None
        try:
            seconds = float(text)
        except ValueError:
            seconds = math.nan
        if not 0 < seconds < math.inf:
            raise HttpRefusal("x-request-timeout takes a number of seconds over 0", field="x-request-timeout")
        return self.arrival + seconds

    async def json(self, bodies: Bodies) -> Any:
        """The body. HttpRefusal where it is too long, or no JSON; Overloaded where it came too slowly; ClientGone."""
        kind = self.header(b"content-type").partition(";")[0].strip().lower()
        if kind != _JSON:  # what a page of another site may send unasked is never JSON
            raise HttpRefusal(
                f"the body must be JSON: send `content-type: {_JSON}`", status=415, code="unsupported_media"
            )
        body = await bodies.read(self._receive, self.header(b"content-length"), self.peer)
        if too_much_work(body):
            raise HttpRefusal(
                "the body has too many values, names or escapes: send less at once",
                status=413,
                code="request_too_large",
            )
        try:
            return from_json(body, allow_inf_nan=False, cache_strings="none")
        except ValueError as error:
            raise HttpRefusal(f"the body is no valid JSON: {error}", code="invalid_json") from None

    @asynccontextmanager
    async def present(self, *, quiet_s: float = 0) -> AsyncIterator[None]:
        """The body is cancelled at once when the client leaves (ClientGone). To be entered when the request was read.

        `quiet_s`: a stream that was silent for so long gets a comment; 0: none.
        """
        self._spoke = time.monotonic()
        scope = asyncio.timeout(None)
        left = False

        async def watch() -> None:
            nonlocal left
            await self._watch(quiet_s)
            left = True
            scope.reschedule(asyncio.get_running_loop().time())

        watcher: asyncio.Task[None] | None = None
        try:
            async with scope:
                watcher = asyncio.create_task(watch())
                try:
                    yield
                finally:
                    watcher.cancel()
        except TimeoutError:
            if not left:
                raise
            raise ClientGone("the client left") from None
        finally:
            if watcher is not None:
                await asyncio.wait([watcher])

    async def _watch(self, quiet_s: float) -> None:
        """Until the client leaves."""
        while True:
            left = self._spoke + quiet_s - time.monotonic() if quiet_s > 0 else None
            if left is not None and left <= 0:
                await self.write(_COMMENT)
                continue
            try:
                async with asyncio.timeout(left):
                    message = await self._receive()
            except TimeoutError:
                continue
            if message["type"] == "http.disconnect":
                return

    async def respond(
        self, status: int, body: bytes, headers: list[tuple[bytes, bytes]] | None = None, kind: str = _JSON
    ) -> None:
        """A whole response."""
        told = [
            (b"content-type", kind.encode()),
            (b"content-length", b"%d" % len(body)),
            *self._identity(),
            *(headers or ()),
        ]
        self.begun, self.status = True, status
        await self._send({"type": "http.response.start", "status": status, "headers": told})
        await self._send({"type": "http.response.body", "body": body})

    async def write(self, events: bytes) -> None:
        """Server-sent events; the first ones open the stream. Waits while the client's buffer is full."""
        self._spoke = time.monotonic()
        if not self.begun:
            self.begun, self.status = True, 200
            await self._send({"type": "http.response.start", "status": 200, "headers": [*_EVENTS, *self._identity()]})
        await self._send({"type": "http.response.body", "body": events, "more_body": True})

    async def end(self) -> None:
        """Closes the stream."""
        await self._send({"type": "http.response.body", "body": b""})

    async def cut(self, last: bytes) -> None:
        """Closes a stream that goes wrong with its last events, whether or not the client reads."""
        if self._cut is not None:
            self._cut(last)
        else:
            await self._send({"type": "http.response.body", "body": last})

    def _identity(self) -> list[tuple[bytes, bytes]]:
        return [(b"x-request-id", self.request_id.encode())] if self.request_id else []
