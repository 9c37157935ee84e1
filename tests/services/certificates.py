"""Authorities and certificates made for a test."""

import ipaddress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

DAY = timedelta(days=1)


@dataclass(frozen=True)
class Pair:
    """Files of a certificate and its key."""

    cert: Path
    key: Path

    def replace_by(self, other: "Pair") -> None:
        """As a renewal does it: new files are moved over the old ones."""
        for mine, its in ((self.key, other.key), (self.cert, other.cert)):
            new = mine.with_suffix(".new")
            new.write_bytes(its.read_bytes())
            new.replace(mine)


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _alternative(text: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(text))
    except ValueError:
        return x509.DNSName(text)


class Authority:
    """Signs certificates; `path` is its own."""

    def __init__(self, folder: Path, name: str = "authority") -> None:
        self._folder, self._name = folder, name
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._count = 0
        now = datetime.now(UTC)
        builder = x509.CertificateBuilder().subject_name(_name(name)).issuer_name(_name(name))
        builder = builder.public_key(self._key.public_key()).serial_number(x509.random_serial_number())
        builder = builder.not_valid_before(now - 9 * DAY).not_valid_after(now + 9 * DAY)
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        self.path = folder / f"{name}.pem"
        self.path.write_bytes(builder.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))

    def issue(self, *names: str, days: float = 1.0, starts: float = -5.0) -> Pair:
        """For these names, valid from `starts` to `days` days from now; negative `days`: it has expired."""
        self._count += 1
        key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC)
        builder = x509.CertificateBuilder().subject_name(_name(names[0])).issuer_name(_name(self._name))
        builder = builder.public_key(key.public_key()).serial_number(x509.random_serial_number())
        builder = builder.not_valid_before(now + starts * DAY).not_valid_after(now + days * DAY)
        builder = builder.add_extension(x509.SubjectAlternativeName([_alternative(n) for n in names]), critical=False)
        pair = Pair(*(self._folder / f"{self._name}-{self._count}.{end}" for end in ("crt", "key")))
        pair.cert.write_bytes(builder.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
        pair.key.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        return pair
