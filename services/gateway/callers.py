"""Whom what is limited is shared among: tenants, or without keys the addresses that calls come from."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

from ...errors import Overloaded
from ..incoming import Context
from ..security.tenant import current_tenant
from .wrong_keys import address_of

RETRY_S = 1.0


def caller_of(peer: str) -> str:
    """Of this task. `peer`: where the call comes from, as gRPC or HTTP tells it."""
    return current_tenant().name or _place(peer)


@lru_cache(maxsize=4096)
def _place(peer: str) -> str:
    return f"/{address_of(peer)}"  # no tenant is named like that


class Share:
    """How much of something each has. A quarter is left by whoever has most, for others."""

    def __init__(self, most: int) -> None:
        """`most`: of all together."""
        self._most = most
        self._each = most - most // 4
        self._taken: Counter[str] = Counter()
        self.taken = 0

    def free(self, caller: str) -> bool:
        """Whether this caller may take one more."""
        return self.taken < self._most and self._taken[caller] < self._each

    def take(self, caller: str) -> None:
        """One, whether or not it is free."""
        self.taken += 1
        self._taken[caller] += 1

    def give_back(self, caller: str) -> None:
        """One that was taken."""
        self.taken -= 1
        self._taken[caller] -= 1
        if not self._taken[caller]:
            del self._taken[caller]


class OpenCalls:
    """Calls over gRPC at once, whatever they are: each takes memory, also one that nothing ever comes of."""

    def __init__(self, most: int) -> None:
        """`most`: one more is refused."""
        self._share = Share(most)

    @property
    def open(self) -> int:
        """Calls now."""
        return self._share.taken

    @contextmanager
    def one(self, context: Context) -> Iterator[None]:
        """A call is open within. Overloaded."""
        caller = caller_of(context.peer() or "")
        if not self._share.free(caller):
            raise Overloaded("too many calls are open (max_calls)", retry_after_s=RETRY_S)
        self._share.take(caller)
        try:
            yield
        finally:
            self._share.give_back(caller)
