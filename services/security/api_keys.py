"""API keys: `tsk_<id>_<secret>`, and what a file keeps of one.

The id finds the key; the secret is 256 random bits, of which the file holds a salted SHA-256. A slow derivation
(scrypt, Argon2) protects what people choose, because that can be guessed; 2^256 secrets cannot, and a slow one would
let whoever sends wrong keys keep the gateway busy.
"""

import hashlib
import hmac
import json
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from ...errors import ConfigError, Unauthenticated
from .limits import RANGES, UNLIMITED, Limits
from .tenant import NAME, Tenant

PREFIX = "tsk_"
FIELD = "api_keys"
INVALID = "the API key is not valid"  # whichever part of it is wrong
_KEY = re.compile(r"tsk_([0-9a-f]{12})_([A-Za-z0-9_-]{43})", re.ASCII)
_HASH = re.compile(r"sha256\$([0-9a-f]{32})\$([0-9a-f]{64})", re.ASCII)
_ID = re.compile(r"[0-9a-f]{12}", re.ASCII)
_TENANT = re.compile(NAME, re.ASCII)
_NO_SALT, _NO_DIGEST = b"\0" * 16, b"\0" * 32
_NEEDED = frozenset({"id", "hash", "tenant"})
_MEMBERS = _NEEDED | {"admin", "expires"} | RANGES.keys()


@dataclass(frozen=True, slots=True)
class ApiKey:
    """What the file keeps of a key. `expires`: seconds since 1970. `limits`: of its tenant; what they do not say is the
    gateway's default."""

    id: str
    salt: bytes
    digest: bytes
    tenant: str
    admin: bool = False
    limits: Limits = UNLIMITED
    expires: float | None = None

    def line(self) -> str:
        """Its line in the file."""
        values: dict[str, Any] = {"id": self.id, "tenant": self.tenant}
        values |= {"hash": f"sha256${self.salt.hex()}${self.digest.hex()}"}
        values |= {"admin": True} if self.admin else {}
        values |= self.limits.said()
        if self.expires is not None:
            values["expires"] = datetime.fromtimestamp(self.expires, UTC).isoformat()
        return json.dumps(values)


def digest_of(salt: bytes, key: str) -> bytes:
    """32 bytes."""
    return hashlib.sha256(salt + key.encode("utf-8", "surrogatepass")).digest()


def new_key(
    tenant: str, *, admin: bool = False, limits: Limits = UNLIMITED, expires: float | None = None
) -> tuple[str, ApiKey]:
    """A key, which is to be seen once, and what the file keeps. ConfigError for a name that will not do."""
    _check_tenant(tenant)
    identity, salt = secrets.token_hex(6), secrets.token_bytes(16)
    key = f"{PREFIX}{identity}_{secrets.token_urlsafe(32)}"
    return key, ApiKey(identity, salt, digest_of(salt, key), tenant, admin, limits, expires)


class KeyRing:
    """The keys of a file."""

    def __init__(self, keys: Mapping[str, ApiKey]) -> None:
        self._keys = keys
        self._limits: dict[str, Limits] = {}
        for key in keys.values():
            self._limits[key.tenant] = self.limits(key.tenant).over(key.limits)

    def __len__(self) -> int:
        return len(self._keys)

    def limits(self, tenant: str) -> Limits:
        """Those that the file sets for a tenant, in any of its lines, whatever credentials it comes with."""
        return self._limits.get(tenant, UNLIMITED)

    def find(self, presented: str, now: float) -> ApiKey:
        """The key that was presented; `now`: seconds since 1970. Unauthenticated where it is none of these.

        Takes as long for an unknown id as for a wrong secret.
        """
        match = _KEY.fullmatch(presented)
        known = self._keys.get(match[1]) if match is not None else None
        salt, digest = (known.salt, known.digest) if known is not None else (_NO_SALT, _NO_DIGEST)
        right = hmac.compare_digest(digest_of(salt, presented), digest)
        if known is None or not right:
            raise Unauthenticated(INVALID)
        if known.expires is not None and now >= known.expires:
            raise Unauthenticated("the API key has expired")
        return known

    def tenant(self, key: ApiKey, default: Limits) -> Tenant:
        """On whose behalf the bearer of this key acts."""
        return Tenant(key.tenant, key.admin, self.limits(key.tenant).over(default))


def read_keys(content: bytes, source: str) -> KeyRing:
    """The ring of a file: a JSON object a line, empty lines and those that begin with # left out.

    ConfigError names the line, never what stands in it: it may be a key that was put there by mistake.
    """
    keys: dict[str, ApiKey] = {}
    limits: dict[tuple[str, str], int] = {}
    for number, raw in enumerate(content.split(b"\n"), start=1):
        line = raw.strip()
        if not line or line.startswith(b"#"):
            continue
        try:
            key = _read_line(line)
            if key.id in keys:
                raise ValueError("its id stands in an earlier line")
            for name, value in key.limits.said().items():
                if limits.setdefault((key.tenant, name), value) != value:
                    raise ValueError(f"{name} differs from an earlier line's for the same tenant")
        except ValueError as error:
            raise ConfigError(f"{FIELD}: {source}, line {number}: {error}", field=FIELD) from None
        keys[key.id] = key
    if not keys:
        raise ConfigError(f"{FIELD}: {source} holds no key: `twostroke keys new` makes one", field=FIELD)
    return KeyRing(keys)


def _read_line(line: bytes) -> ApiKey:
    try:
        values = json.loads(line)
    except (ValueError, RecursionError):
        raise ValueError("not a JSON object: takes a line that `twostroke keys new` printed") from None
    if not isinstance(values, dict) or not values.keys() >= _NEEDED or values.keys() - _MEMBERS:
        raise ValueError(f"takes id, hash and tenant, and perhaps admin, expires, {', '.join(RANGES)}")
    identity, admin = values["id"], values.get("admin", False)
    match = _HASH.fullmatch(values["hash"]) if isinstance(values["hash"], str) else None
    if match is None or not isinstance(identity, str) or not _ID.fullmatch(identity):
        raise ValueError("its id or its hash has not the form that `twostroke keys new` prints")
    if not isinstance(values["tenant"], str) or not _TENANT.fullmatch(values["tenant"]):
        raise ValueError("tenant takes up to 128 letters, digits and . _ - @ : |")
    if not isinstance(admin, bool):
        raise ValueError("admin takes true or false")
    salt, digest = bytes.fromhex(match[1]), bytes.fromhex(match[2])
    limits, expires = Limits.read(values), _read_time(values.get("expires"))
    return ApiKey(identity, salt, digest, values["tenant"], admin, limits, expires)


def _read_time(value: object) -> float | None:
    if value is None:
        return None
    try:
        when = datetime.fromisoformat(value) if isinstance(value, str) else None
    except ValueError:
        when = None
    if when is None or when.tzinfo is None:
        raise ValueError("expires takes a time with its zone, such as 2027-01-31T00:00:00+00:00")
    return when.timestamp()


def _check_tenant(name: str) -> None:
    if not _TENANT.fullmatch(name):
        raise ConfigError(f"tenant: got {name!r}, takes up to 128 letters, digits and . _ - @ : |", field="tenant")
