"""Checks that the engine's records agree with each other, from first principles."""

from collections import Counter
from collections.abc import Iterator

from ..errors import TwostrokeError
from .block_pool import SINK, BlockPool
from .request import Work
from .roster import Roster
from .sequence import Sequence, State


class IntegrityError(TwostrokeError):
    """A fault of ours: pages lost or doubly owned, or records that disagree. The message lists all violations."""


def check_integrity(roster: Roster, *, idle: bool = False) -> None:
    """Recomputes ownership from block tables and holds and compares. Raises IntegrityError. Costs O(pages).

    `idle`: additionally, no sequence, no owned or held page and nothing pending may be left.
    """
    owners = Counter(page for sequence in roster.live.values() for page in _owned(sequence))
    violations = [*_pages(roster.pool, owners), *_cache(roster.pool), *_pending(roster)]
    for sequence in roster.live.values():
        texts = [*_sequence(roster.page_size, sequence), *_content(roster, sequence, owners)]
        violations += [f"{sequence.key}: {text}" for text in texts]
    violations += _sets(roster)
    if idle:
        violations += _leftovers(roster)
    if violations:
        raise IntegrityError("; ".join(violations))


def _owned(sequence: Sequence) -> Iterator[int]:
    """Its block table and what it has set aside for its siblings."""
    yield from sequence.pages
    for private in sequence.siblings.values():
        yield from private


def _pages(pool: BlockPool, owners: Counter[int]) -> Iterator[str]:
    """Each page is in exactly one state, and its reference count is that of its owners."""
    held = Counter(page for pages in pool.holds().values() for page in pages)
    free, evictable = pool.idle_pages()
    unowned = Counter(free) + Counter(evictable)
    for page in range(pool.pages):
        expected = owners[page] + held[page]
        if pool.references(page) != expected:
            yield f"page {page} counts {pool.references(page)} references, has {expected} owners"
        if page == SINK:
            if expected or unowned[page]:
                yield "the sink is in use"
        elif (expected > 0) + unowned[page] != 1:
            yield f"page {page} has {expected} owners and is {unowned[page]} times free or cached"
    if pool.held_pages != len(held):
        yield f"{pool.held_pages} pages count as held, {len(held)} are"


def _cache(pool: BlockPool) -> Iterator[str]:
    """Digests and pages map one to one; unowned pages are cached if and only if they can be found."""
    entries = pool.prefix.entries()
    free, evictable = pool.idle_pages()
    if len(set(entries.values())) != len(entries):
        yield "two digests name one page"
    for digest, page in entries.items():
        if pool.prefix.digest_of(page) != digest:
            yield f"page {page} is found by a digest that it does not have"
    found = set(entries.values())
    yield from (f"free page {page} can be found" for page in free if page in found)
    yield from (f"cached page {page} cannot be found" for page in evictable if page not in found)
    yield from (f"unknown page {page}" for page in found if not SINK < page < pool.pages)


def _pending(roster: Roster) -> Iterator[str]:
    """Only live, admitted sequences keep others waiting, for pages that they have yet to fill."""
    for (group, digest), key in roster.pending.entries().items():
        sequence = roster.live.get(key)
        if sequence is None or not sequence.pages:
            yield f"a pending page's sequence {key} is not at work"
        elif sequence.group != group or digest not in sequence.chain[sequence.registered : sequence.announced]:
            yield f"{key} keeps others waiting for a page that it will not fill"


def _sequence(page_size: int, sequence: Sequence) -> Iterator[str]:
    pages = sequence.pages
    if (sequence.state is State.WAITING) != (not pages):
        yield f"is {sequence.state.value} with {len(pages)} pages"
    if len(set(pages)) != len(pages):
        yield "has a page twice"
    if not sequence.computed <= len(sequence.tokens) <= sequence.limit:
        yield f"{sequence.computed} of {len(sequence.tokens)} tokens computed, limit {sequence.limit}"
    if (
        not sequence.computed
        <= sequence.launched
        <= min(len(sequence.tokens) + sequence.unseen, len(pages) * page_size)
    ):
        yield f"{sequence.computed} tokens computed and {sequence.launched} launched in {len(pages)} pages"
    if not sequence.carried():
        yield "runs for nobody"
    if sequence.siblings and sequence.samples == 1:
        yield "has siblings that it will not part from"


def _content(roster: Roster, sequence: Sequence, owners: Counter[int]) -> Iterator[str]:
    """What is not written yet is nobody else's and cannot be found; what is written is found by its own digest only."""
    full = sequence.computed // roster.page_size
    for page in (page for private in sequence.siblings.values() for page in private):
        if owners[page] > 1 or roster.pool.prefix.digest_of(page) is not None:
            yield f"page {page}, set aside for a sibling, is in use"
    for index, page in enumerate(sequence.pages):
        digest = roster.pool.prefix.digest_of(page)
        if index >= full and digest is not None:
            yield f"page {page} can be found before it is full"
        if index >= full and owners[page] > 1:
            yield f"page {page} is shared before it is full"
        if digest is not None and (index >= len(sequence.chain) or sequence.chain[index] != digest):
            yield f"page {page} is found by other content than its own"


def _sets(roster: Roster) -> Iterator[str]:
    """Every live sequence is in the one collection of its state; running counts are right."""
    places = {State.RUNNING: roster.running, State.AWAITING: roster.awaiting, State.HELD: roster.held}
    waiting = {sequence.key: sequence for sequence in roster.waiting.all()}
    for state, place in {**places, State.WAITING: waiting}.items():
        expected = {sequence.key for sequence in roster.live.values() if sequence.state is state}
        if set(place) != expected:
            yield f"{state.value}: {sorted(set(place) ^ expected)} misplaced"
    tokens = sum(len(sequence.tokens) for sequence in waiting.values() if not sequence.remote)
    if (roster.waiting.total(), roster.waiting.prompt_tokens) != (len(waiting), tokens):
        yield "the waiting queue's figures are wrong"
    carried = {key: sequence for sequence in roster.live.values() for key in sequence.siblings}
    if roster.siblings != carried or carried.keys() & roster.live.keys():
        yield "the table of siblings is wrong"
    admitted = [s for s in roster.live.values() if s.state is not State.WAITING and not s.prefill_only]
    if roster.expected != sum(len(sequence.siblings) for sequence in admitted):
        yield "the count of expected siblings is wrong"
    if roster.decode_work != sum(sequence.request.work is Work.DECODE for sequence in roster.live.values()):
        yield "the count of DECODE sequences is wrong"
    if roster.constrained != sum(sequence.matching is not None for sequence in roster.live.values()):
        yield "the count of constrained sequences is wrong"


def _leftovers(roster: Roster) -> Iterator[str]:
    pool = roster.pool
    if roster.live:
        yield f"{len(roster.live)} sequences left"
    if pool.holds():
        yield f"{len(pool.holds())} holds left"
    if pool.free_pages != pool.usable:
        yield f"{pool.usable - pool.free_pages} pages left in use"
    if len(roster.pending):
        yield f"{len(roster.pending)} pages left pending"
