"""What a gateway knows of the prefixes that its workers have cached: what they told, and what they were sent lately."""

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from ...engine.prefix_cache import extend_chain, root_digest
from ...v1 import worker_pb2 as pb

MAX_DIGESTS = 1024  # leading pages of a prompt that are looked at
TOLD_BYTES = 8  # of a digest, as workers tell them
EXPECTED_S = 30.0  # so long a worker is expected to have, or to make, what it was sent


def prefix_digests(ids: Sequence[int], page_size: int, cache_root: bytes, salt: bytes = b"") -> list[bytes]:
    """The workers' own hash chain over the leading full pages, the last token left out: a computing side's hit ends
    before it."""
    pages = min(MAX_DIGESTS, (len(ids) - 1) // page_size)
    chain: list[bytes] = []
    extend_chain(chain, root_digest(cache_root, salt), list(ids[: pages * page_size]), page_size)
    return [digest[:TOLD_BYTES] for digest in chain]


class CachedPages:
    """The pages in one worker's prefix cache, as it told."""

    def __init__(self, limit: int) -> None:
        """`limit`: of pages; a worker cannot have more."""
        self._limit = limit
        self._digests: set[bytes] = set()

    def __len__(self) -> int:
        return len(self._digests)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._digests

    def apply(self, events: pb.CacheEvents) -> None:
        """Takes what it told. Of more pages than it has nothing is kept: then it tells nonsense."""
        if events.reset:
            self._digests.clear()
        self._digests.difference_update(_split(events.evicted))
        self._digests.update(_split(events.stored))
        if len(self._digests) > self._limit:
            self._digests.clear()

    def leading(self, chain: Sequence[bytes]) -> int:
        """How many leading pages of a prompt it has."""
        for depth, digest in enumerate(chain):
            if digest not in self._digests:
                return depth
        return len(chain)


class ExpectedPages:
    """Which workers were sent which prefixes lately, so that twins which arrive together meet at one worker although it
    could not tell yet; a bounded, least-recently-used memory."""

    def __init__(
        self, capacity: int, *, expires_s: float = EXPECTED_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`capacity`: page digests that are remembered."""
        self._capacity = capacity
        self._expires_s = expires_s
        self._clock = clock
        self._sent: OrderedDict[bytes, dict[int, float]] = OrderedDict()  # until when, by worker

    def __len__(self) -> int:
        return len(self._sent)

    def lookup(self, chain: Sequence[bytes]) -> dict[int, int]:
        """For each worker that was sent the first page: how many leading pages it was sent."""
        now, met = self._clock(), dict[int, int]()
        for depth, page in enumerate(chain):
            sent = self._sent.get(page)
            workers = [w for w, until in sent.items() if until > now and met.get(w, 0) == depth] if sent else []
            if not workers:
                break
            for worker in workers:
                met[worker] = depth + 1
        return met

    def record(self, chain: Sequence[bytes], workers: Iterable[int]) -> None:
        """These workers are sent this prompt now."""
        now = self._clock()
        fresh = dict.fromkeys(workers, now + self._expires_s)
        for page in reversed(chain):  # so that a prefix's first pages are forgotten last
            known = self._sent.get(page, {})
            self._sent[page] = {worker: until for worker, until in known.items() if until > now} | fresh
            self._sent.move_to_end(page)
        while len(self._sent) > self._capacity:
            self._sent.popitem(last=False)

    def forget(self, living: Iterable[int]) -> None:
        """Drops all workers but these."""
        keep = frozenset(living)
        for page, sent in list(self._sent.items()):
            left = {worker: until for worker, until in sent.items() if worker in keep}
            if left:
                self._sent[page] = left
            else:
                del self._sent[page]


def _split(packed: bytes) -> list[bytes]:
    return [packed[at : at + TOLD_BYTES] for at in range(0, len(packed) - len(packed) % TOLD_BYTES, TOLD_BYTES)]
