"""On whose behalf a request runs: what a door learns from the caller's credentials."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from ...errors import PermissionDenied
from .limits import UNLIMITED, Limits

NAME = r"[A-Za-z0-9][A-Za-z0-9_.@|:\-]{0,127}"
"""What a tenant's name looks like."""
_SALT_DOMAIN = b"twostroke tenant\0"


@dataclass(frozen=True, slots=True)
class Tenant:
    """`name`: empty where nobody is told apart."""

    name: str
    admin: bool = False
    limits: Limits = UNLIMITED

    def cache_salt(self, wanted: bytes = b"") -> bytes:
        """The prefix-cache salt of a request that asked for the salt `wanted`: 32 bytes, or `wanted` where nobody is
        told apart. No salt that one tenant asks for makes the salt of another."""
        if not self.name:
            return wanted
        name = self.name.encode()
        return hashlib.sha256(_SALT_DOMAIN + len(name).to_bytes(2, "big") + name + wanted).digest()

    def require_admin(self) -> None:
        """PermissionDenied unless it may give orders to the cluster."""
        if not self.admin:
            raise PermissionDenied(f"tenant {self.name!r} may not do this: it takes an admin's key")


ANYONE = Tenant("", admin=True)
"""Whoever calls, while authentication is off."""
_CURRENT: ContextVar[Tenant] = ContextVar("tenant", default=ANYONE)


def current_tenant() -> Tenant:
    """Of the call that this task serves; `ANYONE` where no door said otherwise."""
    return _CURRENT.get()


def serve_as(tenant: Tenant) -> None:
    """What this task does from here on is done for `tenant`, and so are the tasks that it starts."""
    _CURRENT.set(tenant)


@contextmanager
def serving(tenant: Tenant) -> Iterator[None]:
    """The same for the body of a `with`."""
    token = _CURRENT.set(tenant)
    try:
        yield
    finally:
        _CURRENT.reset(token)
