"""TLS of the HTTP listener, by the same files as gRPC's."""

import ssl
from functools import partial

from ....errors import ConfigError
from ...security.tls import TlsFiles
from ...security.watched_file import WatchedFiles


def listener_context(files: TlsFiles) -> ssl.SSLContext | None:
    """None where no certificate is given: plaintext. With CAs, only clients that show a certificate of theirs may
    connect. New connections get the newest files. ConfigError where the files will not do."""
    paths = files.paths()
    if files.cert is None:
        return None
    watched = WatchedFiles(paths, partial(_context, files))
    listener = _context(files, {})

    def renew(connection: ssl.SSLObject, _: str | None, __: ssl.SSLContext) -> None:
        connection.context = watched.get()

    listener.sni_callback = renew  # called in each handshake, whether or not the client names a host
    return listener


def _context(files: TlsFiles, _: dict[str, bytes]) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    field = f"{files.prefix}_cert"
    try:
        context.load_cert_chain(str(files.cert), str(files.key), password=lambda: b"")
        if files.ca is not None:
            field = files.ca_field
            context.load_verify_locations(files.ca)
            context.verify_mode = ssl.CERT_REQUIRED
    except (OSError, ValueError) as error:  # their text may quote what is in the files
        raise ConfigError(f"{field}: cannot be used ({type(error).__name__})", field=field) from None
    return context


def names_in(certificate: object) -> set[str]:
    """The names in a peer's certificate, as `ssl` shows it."""
    if not isinstance(certificate, dict):
        return set()
    names = {value for _, value in certificate.get("subjectAltName", ())}
    subject = (entry for part in certificate.get("subject", ()) for entry in part)
    return names | {value for key, value in subject if key == "commonName"}
