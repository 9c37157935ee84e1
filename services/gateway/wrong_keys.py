"""Who shows wrong credentials too often: a limit a minute by the address that they come from."""

import hashlib
import ipaddress
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable
from urllib.parse import unquote

from ...errors import Overloaded
from ..security.limits import Limits
from ..security.tenant import Tenant
from .bucket import Bucket
from .ledger import Cost, Ledger

MAX_PEERS = 4096
MAX_PROVEN = 4096
FAILURE = Cost(requests=1)
IPV6_NETWORK = 64  # bits: whoever has one address of such a network has all of them


class WrongKeys:
    """Addresses that failed lately, and credentials that were right lately; both bounded, the oldest go first.

    An address may be a proxy's, with many clients behind it: credentials that were right before are let in from
    anywhere, so that one client's wrong key does not lock the others out.
    """

    def __init__(
        self, per_minute: int, clock_ns: Callable[[], int] = time.monotonic_ns, ledger: Ledger | None = None
    ) -> None:
        """`per_minute`: failures of an address; 0: any number. `ledger`: where several processes count them together,
        and nothing else; None: they are counted here."""
        self.failures = 0
        self.refusals = 0
        self.on_failure: Callable[[], None] | None = None  # are told of each
        self.on_refusal: Callable[[], None] | None = None
        self._per_minute = per_minute
        self._clock_ns = clock_ns
        self._ledger = ledger
        self._limits = Limits(requests_per_minute=per_minute)
        self._peers: OrderedDict[str, Bucket] = OrderedDict()
        self._proven: OrderedDict[bytes, None] = OrderedDict()
        self._salt = secrets.token_bytes(16)  # what is kept here is of no use elsewhere

    def failed(self, peer: str) -> None:
        """Credentials from this address were wrong. Overloaded where that happened too often."""
        self.failures += 1
        if self.on_failure is not None:
            self.on_failure()
        if not self._per_minute or not peer:
            return
        self._check(peer)
        if self._ledger is not None:
            self._ledger.charge(Tenant(peer, limits=self._limits), FAILURE)
            return
        bucket = self._peers.setdefault(peer, Bucket())
        self._peers.move_to_end(peer)
        bucket.add(1, self._per_minute, self._clock_ns())
        if len(self._peers) > MAX_PEERS:
            self._peers.popitem(last=False)

    def right(self, credentials: str, peer: str) -> None:
        """Credentials were right. Overloaded where they were not seen before and the address failed too often: guessing
        is no use meanwhile."""
        if not self._per_minute or self.proven(credentials):
            return
        self._check(peer)
        self._proven[self._proof(credentials)] = None
        if len(self._proven) > MAX_PROVEN:
            self._proven.popitem(last=False)

    def proven(self, credentials: str) -> bool:
        """Whether these were right before, lately."""
        proof = self._proof(credentials)
        if proof not in self._proven:
            return False
        self._proven.move_to_end(proof)
        return True

    def _proof(self, credentials: str) -> bytes:
        return hashlib.sha256(self._salt + credentials.encode("utf-8", "surrogatepass")).digest()

    def _check(self, peer: str) -> None:
        wait_s = self._wait_s(peer)
        if wait_s:
            self.refusals += 1
            if self.on_refusal is not None:
                self.on_refusal()
            raise Overloaded(
                f"too many wrong keys came from this address, {self._per_minute} a minute are looked at",
                retry_after_s=wait_s,
            )

    def _wait_s(self, peer: str) -> float:
        """Until one more may fail."""
        if self._ledger is not None:
            asked = Tenant(peer, limits=self._limits)
            refusal = self._ledger.charge(asked, FAILURE)
            if refusal is not None:
                return refusal.wait_s or 0.0
            self._ledger.correct(asked, FAILURE, Cost())  # it was a question
            return 0.0
        bucket = self._peers.get(peer)
        return bucket.wait_ns(1, self._per_minute, self._clock_ns()) / 1e9 if bucket is not None else 0.0


def address_of(peer: str) -> str:
    """What failures are counted by, of `ipv4:1.2.3.4:5`, `ipv6:%5B::1%5D:5` (gRPC) or a plain address (HTTP); empty
    where it is none, as of a socket file."""
    kind, _, rest = unquote(peer).partition(":")
    host = peer
    if kind in ("ipv4", "ipv6"):
        host = rest.rpartition(":")[0].strip("[]")
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return ""
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is None:
            return str(ipaddress.ip_network((address, IPV6_NETWORK), strict=False))
        address = address.ipv4_mapped
    return str(address)
