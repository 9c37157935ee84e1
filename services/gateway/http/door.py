"""The HTTP listener of a gateway: uvicorn's protocol on the gateway's own loop."""

import asyncio
import logging
import socket
from dataclasses import dataclass
from ssl import SSLContext

from starlette.types import ASGIApp
from uvicorn.config import Config
from uvicorn.server import ServerState

from ....errors import ConfigError
from ...settings import split_address
from .connection import LINGER_S, Connection, ConnectionLimits

KEEP_ALIVE_S = 75  # longer than the proxies in front keep an idle connection: they, not we, shall close it
HANDSHAKE_S = 10.0
LAST_WORDS_S = 2.0  # for answers to leave before connections are cut
BACKLOG = 2048
UNSENT_BYTES = 1 << 17  # what the kernel takes of a connection beyond what is on its way

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Listener:
    """Where, and how secured. `names`: of which a client's certificate must have one; none: any will do. `shared`:
    other processes listen there too."""

    address: str
    tls: SSLContext | None = None
    names: frozenset[str] = frozenset()
    shared: bool = False


class HttpDoor:
    """One loop owns it. `start`, perhaps `drain`, `stop`."""

    def __init__(
        self, app: ASGIApp, listener: Listener, limits: ConnectionLimits, *, handshake_s: float = HANDSHAKE_S
    ) -> None:
        """`handshake_s`: until a connection's TLS stands, else it is closed."""
        self._handshake_s = handshake_s
        self._listener = listener
        self._limits = limits
        self._config = Config(
            app,
            http=Connection,
            ws="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            date_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
        )
        self._config.load()
        logging.getLogger("uvicorn.error").setLevel(logging.ERROR)  # what clients do wrong, they are told
        self._state = ServerState()
        self._server: asyncio.Server | None = None
        self._lost = asyncio.Event()

    @property
    def connections(self) -> int:
        """Open ones."""
        return len(self._state.connections)

    async def start(self) -> str:
        """Listens; returns host:port. ConfigError where the address cannot be had."""
        loop = asyncio.get_running_loop()
        listening = _listen(self._listener.address, shared=self._listener.shared)

        def connect() -> Connection:
            return Connection(self._config, self._state, self._limits, self._listener.names, self._lost.set, loop)

        tls = self._listener.tls
        self._server = await loop.create_server(
            connect, sock=listening, ssl=tls, backlog=BACKLOG, ssl_handshake_timeout=self._handshake_s if tls else None
        )
        host, _, _ = self._listener.address.rpartition(":")
        return f"{host}:{listening.getsockname()[1]}"

    def drain(self) -> None:
        """Idle connections are closed, the others after their response. New ones are taken, to be refused."""
        for connection in list(self._state.connections):
            connection.shutdown()

    async def stop(self) -> None:
        """Listens no more; lets out what is written, for a moment; cuts the rest."""
        if self._server is None:
            return
        self._server.close()
        self.drain()
        try:
            async with asyncio.timeout(LAST_WORDS_S):
                while self._state.connections:
                    self._lost.clear()
                    await self._lost.wait()
        except TimeoutError:
            for connection in list(self._state.connections):
                connection.transport.abort()
        if self._state.tasks:
            await asyncio.wait(list(self._state.tasks), timeout=LINGER_S)


def _listen(address: str, *, shared: bool) -> socket.socket:
    """A bound socket whose connections keep no more than UNSENT_BYTES from a client that does not read."""
    host, port = split_address(address)
    bare = host.strip("[]")
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(bare, port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, kind, protocol)
    except OSError as error:
        raise _unusable(address, error) from error
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if hasattr(socket, "TCP_NOTSENT_LOWAT"):
            listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)
        if family == socket.AF_INET6 and bare == "::":
            listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)  # every interface, as gRPC's
        listening.setblocking(False)
        listening.bind(place)
    except OSError as error:
        listening.close()
        raise _unusable(address, error) from error
    return listening


def _unusable(address: str, error: OSError) -> ConfigError:
    why = (error.strerror or str(error)).lower()
    message = (
        f"http_listen: cannot listen on {address} ({why}); another: --http-listen 127.0.0.1:0, none: --http-listen off"
    )
    return ConfigError(message, field="http_listen")
