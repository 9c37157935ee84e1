"""Security between our own processes, made of the settings that all of them share."""

import ipaddress
import logging

import grpc.aio

from ...errors import ConfigError
from ..grpc_setup import OpenChannel, create_server, open_channel
from ..interceptor import ErrorInterceptor
from ..settings import Settings, WorkerSettings, split_address
from .peer_names import PeerNames
from .tls import Dialer, TlsFiles, server_credentials

logger = logging.getLogger(__name__)


def cluster_files(settings: Settings) -> TlsFiles:
    """The files that the settings name."""
    return TlsFiles(settings.cluster_cert, settings.cluster_key, settings.cluster_ca, "cluster", "cluster_ca")


def cluster_dialer(settings: Settings) -> OpenChannel:
    """Opens channels to workers: over TLS where `cluster_ca` is given. ConfigError where the files will not do."""
    if settings.cluster_ca is None:
        return open_channel
    return Dialer(cluster_files(settings), name=settings.cluster_name)


def worker_credentials(settings: WorkerSettings) -> grpc.ServerCredentials | None:
    """Of a worker's listener; None: plaintext. ConfigError where the files will not do."""
    if settings.cluster_peers and not (settings.cluster_client_certs and settings.cluster_cert):
        message = (
            "cluster_peers: takes cluster_cert, cluster_ca and cluster_client_certs: names are read in certificates"
        )
        raise ConfigError(message, field="cluster_peers")
    return server_credentials(cluster_files(settings), require_client=settings.cluster_client_certs)


def worker_server(settings: WorkerSettings) -> grpc.aio.Server:
    """Of sessions and links."""
    interceptors: list[grpc.aio.ServerInterceptor] = [ErrorInterceptor()]
    if settings.cluster_peers:
        interceptors.append(PeerNames(settings.cluster_peers))
    return create_server(interceptors)


def is_local(address: str) -> bool:
    """Whether only this machine can reach what listens there."""
    host = split_address(address)[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def warn_of_open_worker(settings: WorkerSettings) -> None:
    """Says what is missing where others than this machine can connect."""
    if is_local(settings.listen):
        return
    if settings.cluster_cert is None:
        logger.warning(
            "%s is reached from other machines without TLS: whoever can connect reads prompts and gives orders; keep "
            "it in a network of its own, or give --cluster-cert, --cluster-key and --cluster-ca",
            settings.listen,
        )
    elif not settings.cluster_client_certs:
        logger.warning(
            "%s is reached from other machines without authentication: whoever can connect gives orders "
            "(--cluster-ca, --cluster-client-certs)",
            settings.listen,
        )
