"""One client connection: uvicorn's HTTP/1.1 protocol, bounded in header bytes, in time and in what it buffers."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from email.utils import formatdate
from typing import Any

from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
from uvicorn.server import ServerState

from .errors import HttpRefusal, error_body
from .tls import names_in

CUT = "twostroke.cut"
"""ASGI extension: ends the response now with these last bytes, and closes the connection."""
_OF_BODIES = (b"content-length", b"transfer-encoding")
LINGER_S = 5.0  # for last bytes to leave before the connection is aborted


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Bytes and seconds. `connections`: at once; one more is closed at once."""

    header_bytes: int = 65_536
    receive_s: float = 60.0  # from the first byte of a request to its last
    write_s: float = 30.0  # that a client may leave a full buffer unread
    connections: int = 16_384


class Connection(HttpToolsProtocol):
    """Requests of a connection run one after the other; one that comes before its turn ends the connection, as its
    client could leave unseen."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        limits: ConnectionLimits,
        names: frozenset[str],
        lost: Callable[[], None],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        """`names`: of which the client's certificate must have one; none: it needs none. `lost`: is told when the
        connection is gone."""
        super().__init__(config, server_state, {}, loop)
        self._limits = limits
        self._names = names
        self._stranger = False
        self._lost = lost
        self._header_bytes = 0  # of fields that are whole
        self._head_bytes = 0  # of a head that is not
        self._reading_header = False
        self._has_body = False
        self._refusal: HttpRefusal | None = None
        self._receiving: asyncio.TimerHandle | None = None
        self._writing: asyncio.TimerHandle | None = None
        self._lingering: asyncio.TimerHandle | None = None

    # The connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A connection that says nothing is closed like a request that does not end."""
        super().connection_made(transport)
        self._stranger = bool(self._names) and not self._names & names_in(transport.get_extra_info("peercert"))
        self._expect()
        if len(self.connections) > self._limits.connections:
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Frees the timers."""
        for timer in (self._receiving, self._writing, self._lingering):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)
        self._unset_keepalive_if_required()
        self._lost()

    def data_received(self, data: bytes) -> None:
        """Refuses headers that do not end."""
        if self.transport.is_closing():
            return
        if self._receiving is None and not self._busy():
            self._expect()
        super().data_received(data)
        if self._reading_header:
            self._head_bytes += len(data)
            if self._head_bytes > self._limits.header_bytes:
                self._refuse(_too_large(self._limits.header_bytes))

    # The parser's words

    def on_message_begin(self) -> None:
        """A request begins."""
        if self._busy():
            raise self._note(HttpRefusal("requests must not be pipelined"))
        if self._stranger:
            message = "the certificate's names are not among those that are expected here"
            raise self._note(HttpRefusal(message, status=403, code="permission_denied"))
        self._header_bytes, self._head_bytes, self._reading_header = 0, 0, True
        self._has_body = False
        self.server_state.default_headers = [(b"date", formatdate(usegmt=True).encode())]
        super().on_message_begin()
        extensions: dict[Any, Any] = {CUT: self._cut}
        self.scope["extensions"] = extensions

    def on_header(self, name: bytes, value: bytes) -> None:
        """Counts, trailers too."""
        self._header_bytes += len(name) + len(value) + 4
        if self._header_bytes > self._limits.header_bytes:
            raise self._note(_too_large(self._limits.header_bytes))
        if name.lower() in _OF_BODIES and value.strip() != b"0":
            self._has_body = True
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The request runs from here on. The parser takes what follows a wish to upgrade for another protocol's, or for
        another request: a body would be one that its client, or a proxy, never sent."""
        self._reading_header = False
        if self._has_body and self.parser.should_upgrade():
            message = "a request with a body must not ask for an upgrade: HTTP/1.1 alone is spoken here"
            raise self._note(HttpRefusal(message, field="upgrade"))
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """All of the request is here."""
        if self._receiving is not None:
            self._receiving.cancel()
            self._receiving = None
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """What cannot be understood, or was refused while it was read."""
        refusal, self._refusal = self._refusal, None
        self._refuse(refusal or HttpRefusal("this is no HTTP request", code="bad_request"))

    # The write buffer

    def pause_writing(self) -> None:
        """The buffer is full."""
        super().pause_writing()
        if self._writing is None:
            self._writing = self.loop.call_later(self._limits.write_s, self.transport.abort)

    def resume_writing(self) -> None:
        """The client reads again."""
        super().resume_writing()
        if self._writing is not None:
            self._writing.cancel()
            self._writing = None

    def _cut(self, last: bytes) -> None:
        """Goes past flow control, once a connection: a client that reads nothing may still read this some day."""
        cycle = self.cycle
        if self.transport.is_closing() or cycle is None or cycle.response_complete:
            return
        if cycle.chunked_encoding:
            self.transport.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(last), last))
        cycle.response_complete = True
        cycle.message_event.set()
        self._close()

    def _close(self) -> None:
        """Lets out what is buffered, for a while."""
        self.transport.close()
        self._lingering = self.loop.call_later(LINGER_S, self.transport.abort)

    def _busy(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _expect(self) -> None:
        self._receiving = self.loop.call_later(self._limits.receive_s, self._too_late)

    def _too_late(self) -> None:
        self._receiving = None
        if not (self._reading_header or self._busy()):
            self._close()  # it says nothing, or goes on with what was answered already
            return
        seconds = f"{self._limits.receive_s:g} s"
        self._refuse(HttpRefusal(f"the request did not arrive within {seconds}", status=408, code="request_timeout"))

    def _note(self, refusal: HttpRefusal) -> HttpRefusal:
        """Raised inside of the parser, which only says that something was."""
        self._refusal = refusal
        return refusal

    def _refuse(self, refusal: HttpRefusal) -> None:
        if self.transport.is_closing():
            return
        if self.cycle is not None and self.cycle.response_started and not self.cycle.response_complete:
            self.transport.abort()  # in the middle of an answer there is no place for it
            return
        body = error_body(refusal)
        head = (
            STATUS_LINE[refusal.kind.status],
            b"content-type: application/json\r\nconnection: close\r\n",
            b"content-length: %d\r\n\r\n" % len(body),
        )
        self.transport.write(b"".join(head) + body)
        if self.cycle is not None:
            self.cycle.disconnected = True  # whoever reads the body waits no longer
            self.cycle.message_event.set()
        self._close()


def _too_large(limit: int) -> HttpRefusal:
    return HttpRefusal(f"the headers exceed {limit} bytes", status=431, code="headers_too_large")
