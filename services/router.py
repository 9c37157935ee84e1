"""Picks the workers of a request: pure functions over what is known of each worker."""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

AFFINITY = (
    4.0  # a cached token is worth this many tokens of longer queue: sharing saves the pool's pages and others' time
)
DECODE_AFFINITY = 0.25  # a fully cached prompt is worth this share of a worker's load
MAX_HASHES = 1024  # leading pages of a prompt that are remembered


class Role(IntEnum):
    """What a worker can do (values equal the worker API's)."""

    PREFILL = 1
    DECODE = 2
    BOTH = 3


@dataclass(slots=True)
class WorkerLoad:
    """A worker as the router sees it: what it reported last, corrected by what was sent to it and came back since."""

    name: str
    incarnation: int
    role: Role
    pages: int
    page_size: int
    max_batch: int
    max_tokens: int  # prompt and output together
    free_pages: int
    waiting_tokens: int = 0
    sequences: int = 0
    draining: bool = False

    def charge(self, tokens: int, pages: int) -> None:
        """A sequence was sent to it."""
        self.waiting_tokens += tokens
        self.free_pages = max(0, self.free_pages - pages)
        self.sequences += 1

    def prefilled(self, tokens: int) -> None:
        """A prompt that it was charged for is computed."""
        self.waiting_tokens = max(0, self.waiting_tokens - tokens)

    def ended(self, pages: int) -> None:
        """A sequence is gone from it."""
        self.free_pages = min(self.pages, self.free_pages + pages)
        self.sequences = max(0, self.sequences - 1)

    def report(self, *, free_pages: int, waiting_tokens: int, sequences: int, draining: bool) -> None:
        """Its own word replaces every estimate."""
        self.free_pages = free_pages
        self.waiting_tokens = waiting_tokens
        self.sequences = sequences
        self.draining = draining


@dataclass(frozen=True, slots=True)
class Route:
    """Incarnations of the chosen workers; `prefill` is None where `decode` does all."""

    prefill: int | None
    decode: int
    start_now: bool
    prefill_tokens: int  # to be computed
    pages: int  # that the prompt and one token take


def pages_of(tokens: int, page_size: int) -> int:
    """Pages that so many tokens fill, the last one perhaps in part."""
    return -(-tokens // page_size)


def prefix_hashes(prompt_ids: Sequence[int], page_size: int, salt: bytes = b"") -> list[bytes]:
    """Hash chain over the leading full pages, the last token left out: a computing side's hit ends before it."""
    chain = hashlib.blake2b(salt, digest_size=16).digest()
    hashes: list[bytes] = []
    for page in range(min(MAX_HASHES, (len(prompt_ids) - 1) // page_size)):
        ids = array("Q", prompt_ids[page * page_size : (page + 1) * page_size])
        chain = hashlib.blake2b(chain + ids.tobytes(), digest_size=16).digest()
        hashes.append(chain)
    return hashes


class PrefixAffinity:
    """Which workers met which prefixes lately, by page hash; a bounded, least-recently-used memory."""

    def __init__(self, capacity: int) -> None:
        """`capacity`: page hashes that are remembered."""
        self._capacity = capacity
        self._seen: OrderedDict[bytes, frozenset[int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._seen)

    def lookup(self, hashes: Sequence[bytes]) -> dict[int, int]:
        """For each worker that met the first page: how many leading pages it met."""
        met: dict[int, int] = {}
        for depth, page in enumerate(hashes):
            workers = [w for w in self._seen.get(page, frozenset()) if met.get(w, 0) == depth]
            if not workers:
                break
            for worker in workers:
                met[worker] = depth + 1
        return met

    def record(self, hashes: Sequence[bytes], workers: Iterable[int]) -> None:
        """These workers meet this prompt now."""
        added = frozenset(workers)
        for page in reversed(hashes):  # so that a prefix's first pages are forgotten last
            self._seen[page] = self._seen.get(page, frozenset()) | added
            self._seen.move_to_end(page)
        while len(self._seen) > self._capacity:
            self._seen.popitem(last=False)

    def forget(self, living: Iterable[int]) -> None:
        """Drops all workers but these."""
        keep = frozenset(living)
        for page, workers in list(self._seen.items()):
            if left := workers & keep:
                self._seen[page] = left
            else:
                del self._seen[page]


def choose(
    workers: Iterable[WorkerLoad], prompt_tokens: int, max_tokens: int, met: Mapping[int, int], samples: int = 1
) -> Route | None:
    """The route of a prompt; `met` as `PrefixAffinity.lookup` gives it. None where no worker can take it now.

    A pair of prefill and decode worker, or one worker for all: where there is no prefill worker, where a worker of role
    both is less busy, and (on a prefill worker) where `max_tokens` is 1, as nothing is left to decode.
    """
    able = [worker for worker in workers if not worker.draining]
    wide = [worker for worker in able if samples <= worker.max_batch]  # all samples run at once
    prefill = [w for w in able if w.role is Role.PREFILL and prompt_tokens + 1 <= w.max_tokens]
    whole = [w for w in wide if w.role is Role.BOTH and prompt_tokens + max_tokens <= w.max_tokens]
    decode = [w for w in wide if w.role is Role.DECODE and prompt_tokens + max_tokens <= w.max_tokens]

    def cost(worker: WorkerLoad) -> float:
        return prefill_cost(worker, prompt_tokens, met.get(worker.incarnation, 0))

    single = [*(w for w in prefill if w in wide), *whole]
    if max_tokens == 1 and single:
        return _alone(_least(single, cost), prompt_tokens, met)
    computing = [*whole, *prefill] if decode else whole
    best = _least(computing, cost) if computing else None
    if best is None:
        return _alone(_least(decode, cost), prompt_tokens, met) if decode else None
    if best.role is Role.BOTH:
        return _alone(best, prompt_tokens, met)
    target = _least(decode, lambda w: decode_cost(w, prompt_tokens, met.get(w.incarnation, 0)))
    need = pages_of(prompt_tokens + 1, target.page_size) + samples - 1 - met.get(target.incarnation, 0)
    return Route(
        prefill=best.incarnation,
        decode=target.incarnation,
        start_now=need <= target.free_pages,
        prefill_tokens=uncached(best, prompt_tokens, met),
        pages=pages_of(prompt_tokens + 1, target.page_size),
    )


def prefill_cost(worker: WorkerLoad, prompt_tokens: int, met_pages: int) -> float:
    """Tokens ahead in its queue and of the prompt itself, less a bonus for what it has cached or is computing."""
    saved = min(prompt_tokens, met_pages * worker.page_size)
    return worker.waiting_tokens + prompt_tokens - AFFINITY * saved


def decode_cost(worker: WorkerLoad, prompt_tokens: int, met_pages: int) -> float:
    """Share of its batch and pages in use; a worker that cannot reserve the prompt at once comes last."""
    need = pages_of(prompt_tokens + 1, worker.page_size) - met_pages
    saved = min(1.0, met_pages * worker.page_size / prompt_tokens)
    load = worker.sequences / max(1, worker.max_batch) + 1 - worker.free_pages / max(1, worker.pages)
    return load - DECODE_AFFINITY * saved + (0 if need <= worker.free_pages else 1e6)


def uncached(worker: WorkerLoad, prompt_tokens: int, met: Mapping[int, int]) -> int:
    """Prompt tokens that this worker will have to compute."""
    return max(1, prompt_tokens - met.get(worker.incarnation, 0) * worker.page_size)


def _alone(worker: WorkerLoad, prompt_tokens: int, met: Mapping[int, int]) -> Route:
    pages = pages_of(prompt_tokens + 1, worker.page_size)
    return Route(None, worker.incarnation, True, uncached(worker, prompt_tokens, met), pages)


def _least(workers: Sequence[WorkerLoad], cost: Callable[[WorkerLoad], float]) -> WorkerLoad:
    """The cheapest; among equals the one with the fewest sequences, then the first by name."""
    return min(workers, key=lambda worker: (cost(worker), worker.sequences, worker.name, worker.incarnation))
