"""Certificates of a listener and of channels, read again when their files are replaced."""

import ssl
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import grpc.aio

from ...errors import ConfigError
from ..grpc_setup import MAX_MESSAGE_BYTES, open_channel
from .watched_file import WatchedFiles


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files, and the settings that named them: `prefix`_cert (with its chain), `prefix`_key, `ca_field`."""

    cert: Path | None
    key: Path | None
    ca: Path | None
    prefix: str = "tls"
    ca_field: str = "tls_client_ca"

    def paths(self) -> dict[str, Path]:
        """By setting; ConfigError where a certificate came without its key, or the other way round."""
        named = {f"{self.prefix}_cert": self.cert, f"{self.prefix}_key": self.key, self.ca_field: self.ca}
        if (self.cert is None) != (self.key is None):
            missing, given = [f"{self.prefix}_{part}" for part in ("key", "cert")][:: 1 if self.cert else -1]
            raise ConfigError(f"{missing}: got nothing, takes a PEM file, as {given} is given", field=missing)
        return {field: path for field, path in named.items() if path is not None}


@dataclass(frozen=True, slots=True)
class _Contents:
    cert: bytes | None
    key: bytes | None
    ca: bytes | None


def _read(files: TlsFiles, contents: dict[str, bytes]) -> _Contents:
    """What was read, checked: a certificate beside another one's key, or half a file, must not take effect."""
    cert_field = f"{files.prefix}_cert"
    if files.cert is not None and files.key is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(files.cert, files.key, password=lambda: b"")
        except (OSError, ValueError) as error:
            message = f"{cert_field}: {files.cert} and {files.key} are no certificate with its key: {_why(error)}"
            raise ConfigError(message, field=cert_field) from None
    if files.ca is not None:
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=contents[files.ca_field].decode())
        except (OSError, ValueError) as error:
            message = f"{files.ca_field}: {files.ca} holds no certificates of authorities: {_why(error)}"
            raise ConfigError(message, field=files.ca_field) from None
    return _Contents(contents.get(cert_field), contents.get(f"{files.prefix}_key"), contents.get(files.ca_field))


def _why(error: Exception) -> str:
    reason = getattr(error, "reason", None) or getattr(error, "strerror", None)
    return str(reason or type(error).__name__)  # never the text of a parser: it may quote the key


def server_credentials(files: TlsFiles, *, require_client: bool) -> grpc.ServerCredentials | None:
    """Of a listener; None where no certificate is given: plaintext.

    New connections get the newest files; those that stand keep what they have. With `require_client` only clients with
    a certificate of the CAs may connect. ConfigError where the files will not do.
    """
    paths = files.paths()
    if files.cert is None:
        if files.ca is not None:
            field = f"{files.prefix}_cert"
            raise ConfigError(f"{field}: got nothing, takes a PEM file, as {files.ca_field} is given", field=field)
        return None
    if require_client and files.ca is None:
        message = f"{files.ca_field}: got nothing, takes a PEM file: clients are to show certificates"
        raise ConfigError(message, field=files.ca_field)
    watched = WatchedFiles(paths, partial(_server_side, files))
    return grpc.dynamic_ssl_server_credentials(
        watched.get(),
        _Renewals(watched),  # type: ignore[arg-type]  # None is documented, and wanted where nothing changed
        require_client,
    )


def _server_side(files: TlsFiles, contents: dict[str, bytes]) -> grpc.ServerCertificateConfiguration:
    read = _read(files, contents)
    return grpc.ssl_server_certificate_configuration([(read.key or b"", read.cert or b"")], root_certificates=read.ca)


class _Renewals:
    """Asked by gRPC at each handshake, on a thread of its own: the newest certificates, or None if they are in use."""

    def __init__(self, watched: WatchedFiles[grpc.ServerCertificateConfiguration]) -> None:
        self._watched = watched
        self._in_use = watched.get()

    def __call__(self) -> grpc.ServerCertificateConfiguration | None:
        newest = self._watched.get()
        if newest is self._in_use:
            return None
        self._in_use = newest
        return newest


class Dialer:
    """Opens channels over TLS, each with the newest files."""

    def __init__(self, files: TlsFiles, *, name: str = "", max_message_bytes: int = MAX_MESSAGE_BYTES) -> None:
        """`name`: what servers' certificates must say, where not the host of the address. Without CAs those that gRPC
        knows are trusted. ConfigError where the files will not do."""
        self._watched = WatchedFiles(files.paths(), partial(_channel_side, files))
        self._name = name
        self._max_message_bytes = max_message_bytes

    def __call__(self, address: str) -> grpc.aio.Channel:
        """A channel to host:port; connects on first use."""
        return open_channel(
            address,
            credentials=self._watched.get(),
            server_name=self._name,
            max_message_bytes=self._max_message_bytes,
        )


def _channel_side(files: TlsFiles, contents: dict[str, bytes]) -> grpc.ChannelCredentials:
    read = _read(files, contents)
    return grpc.ssl_channel_credentials(read.ca, read.key, read.cert)
