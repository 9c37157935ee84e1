"""Who calls: headers or metadata in, a tenant or a refusal out; the same for every door.

A door calls `authenticate` with what came with the request and runs it under the tenant (`serve_as`, or
`GenerationRequest.tenant`). Unauthenticated is gRPC's UNAUTHENTICATED and HTTP's 401, PermissionDenied is 403. A door
that learns the peer's address late calls `identify` first and `admit` then.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from ...errors import TwostrokeError, Unauthenticated
from ..security.api_keys import FIELD, PREFIX, KeyRing, read_keys
from ..security.limits import UNLIMITED, Limits
from ..security.tenant import ANYONE, Tenant
from ..security.watched_file import WatchedFiles
from .wrong_keys import WrongKeys, address_of

if TYPE_CHECKING:
    from ..security.signed_tokens import Bearer

HEADER = "authorization"
WANTED = "send `authorization: Bearer <API key>`"
MAX_CREDENTIALS = 8192  # characters

Header = tuple[str | bytes, str | bytes]


class TokenCheck(Protocol):
    """Checks signed tokens; `services/security/signed_tokens.py`."""

    def check(self, token: str) -> "Bearer":
        """Unauthenticated, PermissionDenied."""


@dataclass(frozen=True, slots=True)
class Caller:
    """What credentials say, before it is known where they come from."""

    tenant: Tenant | None  # None: `error` says why
    error: TwostrokeError | None = None
    credentials: str = ""  # empty: none that could be looked at

    def __repr__(self) -> str:
        return f"Caller({self.tenant!r}, {self.error!r})"  # credentials are for nobody's eyes


class Authenticator:
    """Without keys and tokens everybody is `ANYONE`. Any thread may ask; nothing here waits for anything."""

    def __init__(
        self,
        keys: Path | None = None,
        tokens: TokenCheck | None = None,
        *,
        default: Limits = UNLIMITED,
        wrong: WrongKeys | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`keys`: a file of keys; ConfigError where it will not do. `default`: limits of tenants for which
        neither the file nor a token says others. `wrong`: bounds wrong keys; None: nothing does. `clock`: seconds
        since 1970."""
        self._keys: WatchedFiles[KeyRing] | None = None
        if keys is not None:
            self._keys = WatchedFiles({FIELD: keys}, lambda files: read_keys(files[FIELD], str(keys)))
        self._tokens = tokens
        self._default = default
        self.wrong = WrongKeys(0) if wrong is None else wrong
        self._clock = clock

    @property
    def enabled(self) -> bool:
        """Whether callers must say who they are."""
        return self._keys is not None or self._tokens is not None

    def named(self, name: str) -> Tenant:
        """Who acts as this tenant without showing credentials: no admin, with the limits that are said for it."""
        said = self._keys.get().limits(name) if self._keys is not None else UNLIMITED
        return Tenant(name, limits=said.over(self._default))

    def authenticate(self, headers: Iterable[Header], peer: str = "") -> Tenant:
        """The tenant whose credentials came with the call. Unauthenticated, PermissionDenied, or Overloaded where too
        many wrong ones came from `peer` (as gRPC or HTTP has it; empty: unknown).

        `headers`: all of HTTP's, or gRPC's metadata; names in any case, text or bytes.
        """
        return self.admit(self.identify(headers), peer)

    def identify(self, headers: Iterable[Header]) -> Caller:
        """The first half: raises nothing."""
        if not self.enabled:
            return Caller(ANYONE)
        credentials = ""
        try:
            credentials = _presented(headers)
            return Caller(self._check(credentials), None, credentials)
        except TwostrokeError as error:
            return Caller(None, error, credentials)

    def admit(self, caller: Caller, peer: str) -> Tenant:
        """The second half: as `authenticate`. A missing key is no wrong one."""
        address = address_of(peer)
        if caller.tenant is not None:
            if caller.credentials:
                self.wrong.right(caller.credentials, address)
            return caller.tenant
        if caller.credentials and isinstance(caller.error, Unauthenticated):
            self.wrong.failed(address)
        raise caller.error or Unauthenticated(f"no credentials: {WANTED}")

    def _check(self, credentials: str) -> Tenant:
        if self._keys is not None and (self._tokens is None or credentials.startswith(PREFIX)):
            ring = self._keys.get()
            return ring.tenant(ring.find(credentials, self._clock()), self._default)
        if self._tokens is None:
            raise Unauthenticated(f"no credentials: {WANTED}")
        bearer = self._tokens.check(credentials)
        said = self._keys.get().limits(bearer.tenant) if self._keys is not None else UNLIMITED
        return Tenant(bearer.tenant, bearer.admin, said.over(bearer.limits.over(self._default)))


def _presented(headers: Iterable[Header]) -> str:
    found = [value for name, value in headers if _text(name).lower() == HEADER]
    if not found:
        raise Unauthenticated(f"no credentials: {WANTED}")
    if len(found) > 1:
        raise Unauthenticated(f"several `{HEADER}` headers: send one")
    return _bearer(_text(found[0]))


def _text(value: str | bytes) -> str:
    return value.decode("latin-1") if isinstance(value, bytes) else value


def _bearer(value: str) -> str:
    scheme, _, credentials = value.strip().partition(" ")
    credentials = credentials.strip()
    if scheme.lower() != "bearer" or not credentials or not credentials.isascii():
        raise Unauthenticated(f"credentials of another kind: {WANTED}")
    if len(credentials) > MAX_CREDENTIALS:
        raise Unauthenticated(f"the credentials are longer than {MAX_CREDENTIALS} characters")
    return credentials
