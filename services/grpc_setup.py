"""gRPC servers and channels with the options that long-lived, heartbeating streams need."""

from collections.abc import Callable, Sequence
from typing import TypeAlias

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc  # type: ignore[import-untyped]
from grpc_health.v1.health import aio as health_aio  # type: ignore[import-untyped]
from grpc_reflection.v1alpha import reflection  # type: ignore[import-untyped]

HEALTH_SERVICE = "grpc.health.v1.Health"
MAX_MESSAGE_BYTES = 16 << 20
MAX_PENDING = 1 << 14
KEEPALIVE_MS = 10_000
KEEPALIVE_TIMEOUT_MS = 10_000
HANDSHAKE_MS = 10_000  # until a connection's TLS and HTTP/2 stand
CONNECT_MS = 5_000  # the same, at the end that opens it: a busy machine or a long way takes its time
SILENT_S = 30.0
WINDOW_BYTES = 16_384  # of a call that nobody reads yet, or no more: with each of very many held, it is memory

Option = tuple[str, int | str]
OpenChannel: TypeAlias = Callable[[str], grpc.aio.Channel]
"""Opens a channel to host:port."""


def common_options(received: int, sent: int) -> list[Option]:
    """Options of both ends: bytes of a message; no window growth, so that a peer that stops reading stops us soon."""
    return [
        ("grpc.max_receive_message_length", received),
        ("grpc.max_send_message_length", sent),
        ("grpc.http2.bdp_probe", 0),  # else 4 MB a stream pile up for a client that reads nothing
        ("grpc.keepalive_permit_without_calls", 1),
    ]


def server_options(
    max_message_bytes: int = MAX_MESSAGE_BYTES, max_answer_bytes: int = MAX_MESSAGE_BYTES, *, shared: bool = False
) -> list[Option]:
    """Tolerates clients that ping each second; binds a port for itself alone, or `shared` with others that do."""
    return [
        *common_options(max_message_bytes, max_answer_bytes),
        ("grpc.so_reuseport", int(shared)),  # unasked, a second process on the same port would take calls silently
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 500),
        ("grpc.http2.max_ping_strikes", 0),
        # Calls that the loop has not yet taken. By default gRPC drops some at random from 1000 on, as CANCELLED, but a
        # burst must meet the admission's refusal, which says why and when to come back.
        ("grpc.server.max_pending_requests", MAX_PENDING),
        ("grpc.server.max_pending_requests_hard_limit", 2 * MAX_PENDING),
    ]


def channel_options(max_message_bytes: int = MAX_MESSAGE_BYTES) -> list[Option]:
    """Notices a dead peer by keepalive; one connection a channel; no environment proxy between our own processes."""
    return [
        *common_options(max_message_bytes, max_message_bytes),
        ("grpc.keepalive_time_ms", KEEPALIVE_MS),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.enable_http_proxy", 0),
        ("grpc.enable_retries", 0),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", CONNECT_MS),  # what gRPC bounds an attempt by; it waits no longer for that
        ("grpc.max_reconnect_backoff_ms", 1000),
    ]


def create_server(
    interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
    *,
    max_message_bytes: int = MAX_MESSAGE_BYTES,
    max_answer_bytes: int = MAX_MESSAGE_BYTES,
    limits: Sequence[Option] = (),
    shared: bool = False,
) -> grpc.aio.Server:
    """A server without ports or services. Call it on the loop that will serve. `max_message_bytes`: of what it
    receives; `max_answer_bytes`: of what it sends. `limits`: of its connections. `shared`: other processes may serve on
    its ports too."""
    options = [*server_options(max_message_bytes, max_answer_bytes, shared=shared), *limits]
    return grpc.aio.server(interceptors=list(interceptors), options=options)


def connection_fault(details: str) -> str:
    """Why a connection failed, of what gRPC says, which names the address again and again: Connection refused, ..."""
    text = details.splitlines()[0] if details else "no details"
    if "CERTIFICATE_VERIFY_FAILED" in text:
        return f"its certificate is not trusted: {text.removesuffix(': OK').rpartition(': ')[2]}"
    if "Hostname Verification" in text:
        return "its certificate is for another name"
    reason = text.rpartition(": ")[2]
    if reason in ("Socket closed", "Connection reset by peer"):
        return f"{reason} (it may want TLS, or another certificate of ours)"
    return "it does not speak TLS" if "WRONG_VERSION_NUMBER" in text else reason


def connection_limits(
    *,
    metadata_bytes: int,
    streams: int,
    connections: int,
    idle_s: float = 0,
    age_s: float = 0,
    silent_s: float = SILENT_S,
) -> list[Option]:
    """What one connection may have: metadata of a call, calls at once, seconds without a call, seconds in all (after
    which it takes no new calls); 0 seconds: for ever. `connections`: at once. A client that says nothing for
    `silent_s`, and then does not answer a ping for as long, has vanished: its calls are cancelled."""
    silent_ms = round(silent_s * 1000)
    options: list[Option] = [
        ("grpc.max_metadata_size", metadata_bytes),
        ("grpc.absolute_max_metadata_size", metadata_bytes),
        ("grpc.max_concurrent_streams", streams),
        ("grpc.max_allowed_incoming_connections", connections),
        ("grpc.http2.lookahead_bytes", WINDOW_BYTES),
        ("grpc.server_handshake_timeout_ms", HANDSHAKE_MS),
        ("grpc.keepalive_time_ms", silent_ms),
        ("grpc.keepalive_timeout_ms", silent_ms),
        ("grpc.http2.ping_timeout_ms", silent_ms),  # on a server the one before it is not enough
        ("grpc.http2.max_pings_without_data", 0),  # a request may wait for long
    ]
    ages = (("grpc.max_connection_idle_ms", idle_s), ("grpc.max_connection_age_ms", age_s))
    return options + [(name, round(seconds * 1000)) for name, seconds in ages if seconds > 0]


def open_channel(
    address: str,
    *,
    credentials: grpc.ChannelCredentials | None = None,
    server_name: str = "",
    max_message_bytes: int = MAX_MESSAGE_BYTES,
) -> grpc.aio.Channel:
    """A channel to host:port; connects on first use. Plaintext without `credentials`; with them the server's
    certificate must be for `server_name`, or for the host."""
    options = channel_options(max_message_bytes)
    if credentials is None:
        return grpc.aio.insecure_channel(address, options=options)
    if server_name:
        options.append(("grpc.ssl_target_name_override", server_name))
    return grpc.aio.secure_channel(address, credentials, options=options)


def bind(server: grpc.aio.Server, address: str, credentials: grpc.ServerCredentials | None = None) -> str:
    """Opens host:port, in plaintext without `credentials`; returns host:port with the port that was taken (the
    system's choice for port 0).

    Raises RuntimeError where the address is in use or not ours.
    """
    host, _, _ = address.rpartition(":")
    port = server.add_insecure_port(address) if credentials is None else server.add_secure_port(address, credentials)
    return f"{host}:{port}"


class Health:
    """The health service of a process: all named services and the process as a whole (the empty name) move together."""

    def __init__(self, server: grpc.aio.Server, service_names: Sequence[str]) -> None:
        self._names = ("", *service_names)
        self._servicer = health_aio.HealthServicer()
        self._serving: bool | None = None
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)

    @property
    def serving(self) -> bool:
        """What was told last."""
        return bool(self._serving)

    async def set_serving(self, serving: bool) -> None:
        """Tells watchers and checkers; cheap where nothing changed."""
        if serving == self._serving:
            return
        self._serving = serving
        code = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in self._names:
            await self._servicer.set(name, code)

    async def shut_down(self) -> None:
        """NOT_SERVING from now on, whatever is set later."""
        self._serving = False
        await self._servicer.enter_graceful_shutdown()


async def add_health_and_reflection(
    server: grpc.aio.Server, service_names: Sequence[str], *, reflect: bool = True
) -> Health:
    """Adds both services for `service_names` (full names, e.g. `twostroke.v1.Inference`); starts as NOT_SERVING.
    Without `reflect`, health alone."""
    health = Health(server, service_names)
    await health.set_serving(False)
    if reflect:
        add_reflection(server, service_names)
    return health


def add_reflection(server: grpc.aio.Server, service_names: Sequence[str]) -> None:
    """Tells clients the messages of these services."""
    reflection.enable_server_reflection((*service_names, HEALTH_SERVICE, reflection.SERVICE_NAME), server)
