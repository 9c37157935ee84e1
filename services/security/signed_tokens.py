"""JSON Web Tokens that somebody else's identity provider signed, checked by PyJWT against public keys of a file."""

import json
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from ...errors import ConfigError, PermissionDenied, Unauthenticated
from .limits import RANGES, UNLIMITED, Limits
from .tenant import NAME
from .watched_file import WatchedFiles

try:
    import jwt
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
    from cryptography.hazmat.primitives.serialization import load_pem_public_key
except ImportError as error:  # the extra `jwt` brings both
    raise ConfigError("jwt_keys: takes `pip install 'twostroke[jwt]'`", field="jwt_keys") from error

FIELD = "jwt_keys"
LEEWAY_S = 30.0  # between the provider's clock and ours
MAX_KEYS = 256
MIN_RSA_BITS = 2048
INVALID = "the token is not valid"  # where more would tell a forger how close he is
_TENANT = re.compile(NAME, re.ASCII)

PublicKey: TypeAlias = "rsa.RSAPublicKey | ec.EllipticCurvePublicKey | ed25519.Ed25519PublicKey"


@dataclass(frozen=True, slots=True)
class Expected:
    """What a token must say. `tenant_claim`: the claim that names the tenant. `admin_scope`: the scope of admins.
    `limits_claim`: the claim that holds the tenant's limits; empty: none does."""

    audience: str
    issuer: str
    tenant_claim: str = "sub"
    admin_scope: str = "twostroke:admin"
    limits_claim: str = "twostroke_limits"


@dataclass(frozen=True, slots=True)
class Bearer:
    """Of a token that holds."""

    tenant: str
    admin: bool
    limits: Limits = UNLIMITED


@dataclass(frozen=True, slots=True)
class _Key:
    id: str | None
    algorithm: str  # the only one that it is for: the token does not choose
    key: PublicKey


class SignedTokens:
    """Checks tokens. ConfigError where the file holds no usable key, or is something secret."""

    def __init__(self, path: Path, expected: Expected, *, clock: Callable[[], float] = time.monotonic) -> None:
        """`path`: a JWKS, or one public key as PEM; read again when it is replaced."""
        self._keys = WatchedFiles({FIELD: path}, lambda files: read_public_keys(files[FIELD], str(path)), clock=clock)
        self._expected = expected

    def check(self, token: str) -> Bearer:
        """Unauthenticated where it does not hold, PermissionDenied where it holds and names no tenant."""
        expected = self._expected
        try:
            key = self._key_of(jwt.get_unverified_header(token))
            claims = jwt.decode(
                token,
                key.key,
                algorithms=[key.algorithm],
                audience=expected.audience,
                issuer=expected.issuer,
                leeway=LEEWAY_S,
                options={"require": ["exp", "aud", "iss"]},
            )
        except jwt.PyJWTError as error:
            raise Unauthenticated(_why(error)) from None
        except (ValueError, TypeError, RecursionError):  # what its parts decode to is the sender's choice
            raise Unauthenticated(INVALID) from None
        return self._bearer(claims)

    def _key_of(self, header: Mapping[str, Any]) -> _Key:
        """By its id, else the only one of that algorithm."""
        algorithm, identity = header.get("alg"), header.get("kid")
        fitting = [key for key in self._keys.get() if key.algorithm == algorithm]
        if not fitting:
            raise jwt.InvalidAlgorithmError
        named = [key for key in fitting if identity is not None and key.id == identity]
        if not named and (identity is None or fitting[0].id is None):
            named = fitting
        if len(named) != 1:
            raise jwt.InvalidKeyError
        return named[0]

    def _bearer(self, claims: Mapping[str, Any]) -> Bearer:
        tenant = claims.get(self._expected.tenant_claim)
        if not isinstance(tenant, str) or not _TENANT.fullmatch(tenant):
            raise PermissionDenied(f"the token's claim {self._expected.tenant_claim!r} does not name a tenant")
        scopes = claims.get("scope", claims.get("scp", ""))
        words = scopes.split() if isinstance(scopes, str) else scopes if isinstance(scopes, list) else ()
        admin = bool(self._expected.admin_scope) and self._expected.admin_scope in words
        return Bearer(tenant, admin, self._limits(claims))

    def _limits(self, claims: Mapping[str, Any]) -> Limits:
        """A claim that cannot be read is refused: without it the tenant would have none of its limits."""
        name = self._expected.limits_claim
        values = claims.get(name) if name else None
        if values is None:
            return UNLIMITED
        try:
            if not isinstance(values, dict) or values.keys() - RANGES.keys():
                raise ValueError(f"takes an object with {', '.join(RANGES)}")
            return Limits.read(values)
        except ValueError as error:
            raise PermissionDenied(f"the token's claim {name!r}: {error}") from None


def _why(error: "jwt.PyJWTError") -> str:
    """More than `INVALID` only of a token whose signature held, or of what its sender knows anyway."""
    match error:
        case jwt.ExpiredSignatureError():
            return "the token has expired"
        case jwt.ImmatureSignatureError():
            return "the token is not valid yet"
        case jwt.InvalidAudienceError():
            return "the token is for another audience"
        case jwt.InvalidIssuerError():
            return "the token is of another issuer"
        case jwt.MissingRequiredClaimError():
            return f"the token lacks the claim {error.claim!r}"
        case jwt.InvalidAlgorithmError():
            return "the token is signed by an algorithm that is not accepted here"
        case _:
            return INVALID


def read_public_keys(content: bytes, source: str) -> tuple[_Key, ...]:
    """Keys of a JWKS, or the one of a PEM file. ConfigError where there is none, or where one is not public."""
    text = content.strip()
    keys = _read_jwks(text, source) if text.startswith(b"{") else [_read_pem(text, source)]
    if not 0 < len(keys) <= MAX_KEYS:
        raise _refused(source, f"takes 1 to {MAX_KEYS} keys to check signatures with")
    identities = [key.id for key in keys if key.id is not None]
    if len(set(identities)) < len(identities):
        raise _refused(source, "two keys share one `kid`")
    return tuple(keys)


def _read_jwks(content: bytes, source: str) -> list[_Key]:
    try:
        entries = json.loads(content)["keys"]
        if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
            raise ValueError
    except (ValueError, KeyError, RecursionError):
        raise _refused(source, "is no JSON Web Key Set: takes an object with `keys`") from None
    keys = []
    for entry in entries:
        if entry.get("kty") == "oct" or "d" in entry:
            raise _refused(source, "holds a secret key: takes public keys only")
        if entry.get("use", "sig") != "sig":
            continue
        try:
            key: Any = jwt.PyJWK.from_dict(entry, algorithm=entry.get("alg") or _guess(entry)).key
            found = _Key(entry.get("kid"), _algorithm(key), key)
        except (jwt.PyJWTError, ValueError, TypeError, KeyError):
            continue  # providers list keys for other uses, of kinds that we do not take
        if entry.get("alg", found.algorithm) in (found.algorithm, "Ed25519"):
            keys.append(found)
    return keys


def _guess(entry: Mapping[str, Any]) -> str:
    return {"RSA": "RS256", "EC": "ES256", "OKP": "EdDSA"}[entry["kty"]]


def _read_pem(content: bytes, source: str) -> _Key:
    if b"PRIVATE KEY" in content:
        raise _refused(source, "holds a private key: takes a public one")
    try:
        key: Any = load_pem_public_key(content)
        return _Key(None, _algorithm(key), key)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise _refused(source, "takes a JSON Web Key Set, or a public key as PEM (RSA, P-256 or Ed25519)") from None


def _algorithm(key: object) -> str:
    """RS256, ES256 or EdDSA; ValueError for keys of other kinds."""
    if isinstance(key, rsa.RSAPublicKey) and key.key_size >= MIN_RSA_BITS:
        return "RS256"
    if isinstance(key, ec.EllipticCurvePublicKey) and isinstance(key.curve, ec.SECP256R1):
        return "ES256"
    if isinstance(key, ed25519.Ed25519PublicKey):
        return "EdDSA"
    raise ValueError("not accepted")


def _refused(source: str, why: str) -> ConfigError:
    return ConfigError(f"{FIELD}: {source} {why}", field=FIELD)
