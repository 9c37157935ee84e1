"""Picks the workers of a request: pure functions over what is known of each worker."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Protocol, TypeAlias

from .speeds import Rate

AFFINITY = (
    4.0  # a cached token is worth this many tokens of longer queue: sharing saves the pool's pages and others' time
)
DECODE_AFFINITY = 0.25  # a fully cached prompt is worth this share of a worker's load
MAX_COMPARED = 3  # candidates that a reason names, the chosen one counted in


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
    sent: int = 0  # sequences, so far
    layers: int = 0  # of the model
    kv_token_bytes: int = 0  # of a token, all layers
    chunk_tokens: int = 0  # of prompts that it computes a step while it decodes; 0: as many as there are
    decode_step_s: float = 0.0  # 0: none was seen
    prompt_rate: Rate = field(default_factory=Rate)
    pair_rates: Mapping[int, float] = field(default_factory=dict)  # GB/s to decode workers, by incarnation

    def charge(self, tokens: int, pages: int) -> None:
        """A sequence was sent to it."""
        self.waiting_tokens += tokens
        self.free_pages = max(0, self.free_pages - pages)
        self.sequences += 1
        self.sent += 1

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
    reason: str = ""  # the figures that decided, for people
    moved_tokens: int = 0  # whose KV goes from `prefill` to `decode`


class Weighed(Protocol):
    """What `Weigh` answers."""

    @property
    def local(self) -> bool:
        """Whether the decode worker computes the prompt."""

    @property
    def reason(self) -> str:
        """The figures, for people."""


Weigh: TypeAlias = Callable[[WorkerLoad, WorkerLoad, int, int, int], Weighed]
"""Of a prefill and a decode worker: which one computes a prompt? See `Placement.weigh`."""


def pages_of(tokens: int, page_size: int) -> int:
    """Pages that so many tokens fill, the last one perhaps in part."""
    return -(-tokens // page_size)


def choose(
    workers: Iterable[WorkerLoad],
    prompt_tokens: int,
    max_tokens: int,
    met: Mapping[int, int],
    samples: int = 1,
    *,
    local_tokens: int = 0,
    weigh: Weigh | None = None,
) -> Route | None:
    """The route of a prompt; `met`: leading pages that workers have or will have. None where nobody can take it now.

    A pair of prefill and decode worker, or one worker for all: where there is no prefill worker, where a worker of role
    both is less busy, where the decode worker has to compute no more than `local_tokens` or `weigh` is for it, and
    (on a prefill worker) where `max_tokens` is 1, as nothing is left to decode.
    """
    able = [worker for worker in workers if not worker.draining]
    wide = [worker for worker in able if samples <= worker.max_batch]  # all samples run at once
    prefill = [w for w in able if w.role is Role.PREFILL and prompt_tokens + 1 <= w.max_tokens]
    whole = [w for w in wide if w.role is Role.BOTH and prompt_tokens + max_tokens <= w.max_tokens]
    decode = [w for w in wide if w.role is Role.DECODE and prompt_tokens + max_tokens <= w.max_tokens]

    def computing(among: Sequence[WorkerLoad]) -> _Choice:
        return _cheapest(among, [prefill_cost(w, prompt_tokens, met.get(w.incarnation, 0)) for w in among])

    def alone(choice: _Choice, why: str) -> Route:
        worker = choice.worker
        reason = f"{worker.name} alone, {why} ({_cached(worker, prompt_tokens, met)}; {choice})"
        pages = pages_of(prompt_tokens + 1, worker.page_size)
        return Route(None, worker.incarnation, True, uncached(worker, prompt_tokens, met), pages, reason)

    single = [*(w for w in prefill if samples <= w.max_batch), *whole]
    if max_tokens == 1 and single:
        return alone(computing(single), "as one token is wanted")
    candidates = [*whole, *prefill] if decode else whole
    if not candidates:
        return alone(computing(decode), "as no prefill worker is there") if decode else None
    best = computing(candidates)
    if best.worker.role is Role.BOTH:
        return alone(best, "as it does both")
    target = _cheapest(decode, [decode_cost(w, prompt_tokens, met.get(w.incarnation, 0)) for w in decode])
    own = uncached(target.worker, prompt_tokens, met)
    if own <= local_tokens:
        return alone(target, f"as at most {local_tokens} tokens are to be computed")
    prefill_tokens = uncached(best.worker, prompt_tokens, met)
    moved = max(0, prompt_tokens - met.get(target.worker.incarnation, 0) * target.worker.page_size)
    verdict = weigh(best.worker, target.worker, prefill_tokens, own, moved) if weigh is not None else None
    if verdict is not None and verdict.local:
        return alone(target, verdict.reason)
    pages = pages_of(prompt_tokens + 1, target.worker.page_size)
    parts = [f"{name} {c.worker.name} ({_cached(c.worker, prompt_tokens, met)}; {c})" for name, c in
             (("prefill", best), ("decode", target))]  # fmt: skip
    return Route(
        prefill=best.worker.incarnation,
        decode=target.worker.incarnation,
        start_now=pages + samples - 1 - met.get(target.worker.incarnation, 0) <= target.worker.free_pages,
        prefill_tokens=prefill_tokens,
        pages=pages,
        reason=", ".join([*parts, verdict.reason] if verdict is not None else parts),
        moved_tokens=moved,
    )


def prefill_cost(worker: WorkerLoad, prompt_tokens: int, met_pages: int) -> float:
    """Tokens ahead in its queue and of the prompt itself, less a bonus for what it has cached or is computing."""
    saved = min(prompt_tokens, met_pages * worker.page_size) if met_pages else 0
    return worker.waiting_tokens + prompt_tokens - AFFINITY * saved


def decode_cost(worker: WorkerLoad, prompt_tokens: int, met_pages: int) -> float:
    """Share of its batch and pages in use; a worker that cannot reserve the prompt at once comes last."""
    load = worker.sequences / worker.max_batch + 1 - worker.free_pages / worker.pages
    if met_pages:
        load -= DECODE_AFFINITY * min(1.0, met_pages * worker.page_size / prompt_tokens)
    need = pages_of(prompt_tokens + 1, worker.page_size) - met_pages
    return load if need <= worker.free_pages else load + 1e6


def uncached(worker: WorkerLoad, prompt_tokens: int, met: Mapping[int, int]) -> int:
    """Prompt tokens that this worker will have to compute."""
    return max(1, prompt_tokens - met.get(worker.incarnation, 0) * worker.page_size)


def _cached(worker: WorkerLoad, prompt_tokens: int, met: Mapping[int, int]) -> str:
    return f"{min(prompt_tokens, met.get(worker.incarnation, 0) * worker.page_size)} of {prompt_tokens} tokens cached"


@dataclass(frozen=True, slots=True)
class _Choice:
    """The cheapest of some workers, and what it and the next ones cost."""

    worker: WorkerLoad
    costs: list[tuple[float, str]]
    of: int

    def __str__(self) -> str:
        costs = ", ".join(f"{name} {cost:.4g}" for cost, name in self.costs)
        return f"costs of {self.of}: {costs}"


def _cheapest(workers: Sequence[WorkerLoad], costs: Iterable[float]) -> _Choice:
    """Among equals the one with the fewest sequences, then the one that was sent the fewest so far: idle workers take
    turns, so that all of their caches fill."""
    ranked = sorted(
        (cost, w.sequences, w.sent, w.name, w.incarnation, w) for cost, w in zip(costs, workers, strict=True)
    )
    return _Choice(ranked[0][5], [(entry[0], entry[3]) for entry in ranked[:MAX_COMPARED]], len(workers))
