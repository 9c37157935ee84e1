"""A gateway's security, made of its settings."""

import logging
from dataclasses import dataclass

import grpc.aio

from ...errors import ConfigError
from ..field_count import FieldCount
from ..grpc_setup import connection_limits, create_server
from ..incoming import Arrival
from ..interceptor import ErrorInterceptor
from ..security.cluster import is_local
from ..security.limits import Limits
from ..security.peer_names import PeerNames
from ..security.tls import TlsFiles, server_credentials
from ..settings import GatewaySettings
from .arrivals import Arrivals
from .auth import Authenticator, TokenCheck
from .auth_interceptor import AuthInterceptor
from .callers import OpenCalls
from .ledger import Ledger
from .wrong_keys import WrongKeys

LEAST_PLACES = 4  # one is then left for others

logger = logging.getLogger(__name__)


def authenticator(settings: GatewaySettings, failures: Ledger | None = None) -> Authenticator:
    """Of all doors. ConfigError where keys or tokens cannot be checked as asked. `failures`: where several processes
    count wrong keys together."""
    wrong = WrongKeys(settings.wrong_keys_per_minute, ledger=failures)
    return Authenticator(settings.api_keys, _tokens(settings), default=_tenant_limits(settings), wrong=wrong)


def _tenant_limits(settings: GatewaySettings) -> Limits:
    """Of tenants for which nothing else is said."""
    return Limits(
        max_requests=settings.tenant_requests,
        requests_per_minute=settings.tenant_requests_per_minute,
        input_tokens_per_minute=settings.tenant_input_tokens_per_minute,
        output_tokens_per_minute=settings.tenant_output_tokens_per_minute,
        priority=settings.tenant_priority,
    )


def _tokens(settings: GatewaySettings) -> TokenCheck | None:
    if settings.jwt_keys is None:
        return None
    for name in ("jwt_audience", "jwt_issuer"):
        if not getattr(settings, name):
            message = f"{name}: got nothing, takes a text: tokens made for others would be taken with jwt_keys alone"
            raise ConfigError(message, field=name)
    from ..security.signed_tokens import Expected, SignedTokens  # an extra, which not every gateway needs

    expected = Expected(
        settings.jwt_audience,
        settings.jwt_issuer,
        settings.jwt_tenant_claim,
        settings.jwt_admin_scope,
        settings.jwt_limits_claim,
    )
    return SignedTokens(settings.jwt_keys, expected)


def door_credentials(settings: GatewaySettings) -> grpc.ServerCredentials | None:
    """Of the gateway's listener; None: plaintext."""
    files = TlsFiles(settings.tls_cert, settings.tls_key, settings.tls_client_ca)
    if settings.tls_client_names and settings.tls_client_ca is None:
        message = "tls_client_ca: got nothing, takes a PEM file, as tls_client_names is given"
        raise ConfigError(message, field="tls_client_ca")
    return server_credentials(files, require_client=settings.tls_client_ca is not None)


@dataclass(frozen=True, slots=True)
class Bounds:
    """What all ports of a gateway share."""

    arrivals: Arrivals
    calls: OpenCalls


def shared_bounds(settings: GatewaySettings) -> Bounds:
    """ConfigError where not even a few requests could be on their way."""
    places = settings.arriving_bytes // settings.max_message_bytes
    if places < LEAST_PLACES:
        least = LEAST_PLACES * settings.max_message_bytes
        message = f"arriving_bytes: got {settings.arriving_bytes}, takes {least} or more with this max_message_bytes"
        raise ConfigError(message, field="arriving_bytes")
    return Bounds(Arrivals(places), OpenCalls(settings.max_calls))


def door_server(
    settings: GatewaySettings,
    auth: Authenticator,
    bounds: Bounds,
    admin_services: tuple[str, ...],
    *,
    tls: bool,
    streams: int = 0,
) -> grpc.aio.Server:
    """With the interceptors and limits that every port for clients has. `tls`: it will listen with certificates.
    `streams`: calls at once of one connection; 0: as for clients."""
    arrival = Arrival(
        FieldCount(), settings.request_s, settings.stream_idle_s, room=bounds.arrivals.of, counted=bounds.calls.one
    )
    interceptors: list[grpc.aio.ServerInterceptor] = [ErrorInterceptor(arrival)]
    if tls and settings.tls_client_names:
        interceptors.append(PeerNames(settings.tls_client_names))
    if auth.enabled:
        interceptors.append(AuthInterceptor(auth, admin_services=admin_services))
    limits = connection_limits(
        metadata_bytes=settings.max_metadata_bytes,
        streams=streams or settings.max_streams,
        connections=settings.grpc_connections,
        idle_s=settings.connection_idle_s,
        age_s=settings.connection_age_s,
    )
    shared = settings.processes > 1
    return create_server(
        interceptors,
        max_message_bytes=settings.max_message_bytes,
        max_answer_bytes=settings.max_answer_bytes,
        limits=limits,
        shared=shared,
    )


def warn_of_open_doors(settings: GatewaySettings, auth: Authenticator) -> None:
    """Says what is missing where others than this machine can connect."""
    places = [place for place in (settings.listen, settings.http_place) if place and not is_local(place)]
    where = f"{' and '.join(places)} {'is' if len(places) == 1 else 'are'}"
    if not places:
        return
    if settings.tls_cert is None:
        logger.warning(
            "%s reached from other machines without TLS: prompts, answers and keys can be read on the way "
            "(--tls-cert, --tls-key; or a proxy in front that ends TLS, and addresses of this machine alone)",
            where,
        )
    if not auth.enabled and settings.tls_client_ca is None:
        logger.warning(
            "%s reached from other machines without authentication: whoever can connect may use the model, and "
            "drain workers (--api-keys, --jwt-keys or --tls-client-ca)",
            where,
        )
