"""How a client reaches a gateway: TLS or not, and the credentials that it shows."""

from dataclasses import dataclass
from pathlib import Path

import grpc.aio

from ...errors import ConfigError
from ..grpc_setup import open_channel
from ..security.tls import Dialer, TlsFiles
from ..security.watched_file import read_bounded

MAX_KEY = 8192


@dataclass(frozen=True, slots=True)
class Access:
    """`tls`: over TLS, by the authorities of `ca`, or those that gRPC knows. `name`: of the certificate, where not the
    host of the address. `key`: an API key or a token; it is in no text made of this."""

    tls: bool = False
    ca: Path | None = None
    cert: Path | None = None
    cert_key: Path | None = None
    name: str = ""
    key: "Secret | None" = None

    def channel(self, address: str) -> grpc.aio.Channel:
        """To a gateway. ConfigError where the files will not do."""
        if not (self.tls or self.ca or self.cert or self.cert_key or self.name):
            return open_channel(address)
        files = TlsFiles(self.cert, self.cert_key, self.ca, "client", "ca")
        return Dialer(files, name=self.name)(address)

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Of every call."""
        return (("authorization", f"Bearer {self.key.value}"),) if self.key is not None else ()


class Secret:
    """A text that does not show when it is printed."""

    def __init__(self, value: str) -> None:
        """ConfigError for what is no credentials."""
        self.value = value.strip()
        if not self.value or not self.value.isascii() or not self.value.isprintable() or len(self.value) > MAX_KEY:
            raise ConfigError("api key: takes the key that `twostroke keys new` printed, or a token", field="api_key")

    def __repr__(self) -> str:
        return "Secret(...)"

    @classmethod
    def of_file(cls, path: Path) -> "Secret":
        """What stands in a file, whitespace around it left out."""
        return cls(read_bounded(path, "api_key_file").decode("ascii", "replace"))


OPEN = Access()
"""Plaintext, without credentials."""
