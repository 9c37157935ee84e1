"""Which waiting sequences get pages and a place in the batch, and who must make room for them."""

from collections.abc import Iterable

from .config import EngineOptions
from .output_length import OutputLength
from .request import Reservation
from .roster import Roster
from .sequence import Sequence


class Admission:
    """First come, first served within `WaitingQueue`'s order: the most urgent first, however long the others wait.

    A sequence is admitted only with all pages for its known tokens and its headroom. One that does not fit keeps all
    behind it out, else it could starve; one that waits for another's pending pages lets them pass, because its turn
    depends on work that is already admitted and goes on; so does one whose grammar is still being compiled.
    """

    def __init__(self, roster: Roster, options: EngineOptions) -> None:
        self._roster = roster
        self._reserve = options.reserve
        self._max_batch = options.max_batch
        self._watermark = int(options.watermark * roster.pool.usable)
        self._unticketed_pages = int(options.unticketed_share * roster.pool.usable)
        self.output_length = OutputLength()

    def admit(self, now: float) -> list[Reservation]:
        """Admits all that can be; returns the reservations of those whose KV comes from elsewhere."""
        reserved: list[Reservation] = []
        for sequence in self._roster.waiting.in_order():
            if self._roster.in_batch() + places(sequence) > self._max_batch:
                break
            if sequence.held and not sequence.remote:  # one whose KV comes from elsewhere waits for it meanwhile
                continue
            hits = self._hits(sequence)
            if hits is None:
                continue
            wanted = self.pages_wanted(sequence)
            private = private_pages(sequence, wanted, self._roster.page_size)
            fresh = wanted - len(hits)
            if not self._make_room(sequence, hits, fresh + private * len(sequence.siblings)):
                break
            self._roster.enter(sequence, hits, fresh, private)
            self._note_hits(sequence, len(hits))
            if sequence.remote:
                reserved.append(self._reservation(sequence, now))
        return reserved

    def pages_wanted(self, sequence: Sequence) -> int:
        """Pages for its known tokens, one more token and the headroom; never more than it can ever fill.

        Where a headroom for every sample is more than the pool holds, each gets the one token only.
        """
        wanted = self._pages_with(sequence, self._headroom(sequence))
        private = private_pages(sequence, wanted, self._roster.page_size)
        if private and wanted + private * len(sequence.siblings) > self._roster.pool.usable:
            return self._pages_with(sequence, 1)
        return wanted

    def _pages_with(self, sequence: Sequence, headroom: int) -> int:
        known = len(sequence.tokens)
        positions = known if sequence.prefill_only else min(known + headroom, max(known, sequence.limit - 1))
        return -(-positions // self._roster.page_size)

    def _headroom(self, sequence: Sequence) -> int:
        if self._reserve == "prompt":
            return 1
        if self._reserve == "max":
            return sequence.limit
        return max(1, self.output_length.expected() - sequence.next_index())

    def _hits(self, sequence: Sequence) -> list[int] | None:
        """Its cached pages; None while another sequence is filling the first one that it lacks."""
        roster = self._roster
        if sequence.unscored:
            return []
        if sequence.blocked_on is not None and (sequence.group, sequence.blocked_on) in roster.pending:
            return None
        sequence.blocked_on = None
        known = len(sequence.tokens)
        # Without the last token's forward pass there are no logits; a DECODE sequence gets its token 0 from the writer.
        most = (known if sequence.remote else known - 1) // roster.page_size
        hits = roster.pool.prefix.match(sequence.chain[:most])
        if len(hits) < min(most, len(sequence.chain)):
            missing = sequence.chain[len(hits)]
            if (sequence.group, missing) in roster.pending:
                sequence.blocked_on = missing
                return None
        return hits

    def _make_room(self, sequence: Sequence, hits: list[int], fresh: int) -> bool:
        """Whether it fits now, after taking unticketed sequences' pages where it may."""
        if sequence.unticketed:
            mine = sum(len(other.pages) for other in self._roster.admitted() if other.unticketed)
            return mine + len(hits) + fresh <= self._unticketed_pages and self._lacking(hits, fresh) <= 0
        lacking = self._lacking(hits, fresh)
        if lacking > 0:
            for victim in self._victims(lacking, hits):
                self._roster.preempt(victim)
            lacking = self._lacking(hits, fresh)
        return lacking <= 0

    def _lacking(self, hits: Iterable[int], fresh: int) -> int:
        """Pages missing. The watermark leaves running sequences room to grow; with none admitted it has no purpose."""
        pool = self._roster.pool
        watermark = self._watermark if any(True for _ in self._roster.admitted()) else 0
        return fresh + watermark + sum(map(pool.is_evictable, hits)) - pool.free_pages

    def _victims(self, lacking: int, hits: Iterable[int]) -> list[Sequence]:
        """Unticketed sequences, the least urgent and youngest first, whose pages make up for `lacking`; none if all of
        them do not."""
        pool, kept = self._roster.pool, set(hits)
        dropped: dict[int, int] = {}
        victims: list[Sequence] = []
        unticketed = [sequence for sequence in self._roster.admitted() if sequence.unticketed]
        for victim in sorted(unticketed, key=lambda sequence: sequence.turn, reverse=True):
            victims.append(victim)
            for page in victim.pages:
                dropped[page] = dropped.get(page, 0) + 1
                lacking -= dropped[page] == pool.references(page) and page not in kept
            if lacking <= 0:
                return victims
        return []

    def _note_hits(self, sequence: Sequence, hits: int) -> None:
        if not sequence.preempted:
            sequence.timings.cached_tokens = min(hits * self._roster.page_size, len(sequence.request.prompt_ids))

    def _reservation(self, sequence: Sequence, now: float) -> Reservation:
        sequence.began = now
        sequence.timings.queue = now - sequence.arrival
        written = sequence.pages[sequence.registered : -(-sequence.base // self._roster.page_size)]
        return Reservation(sequence.key, sequence.request.writer, written, sequence.computed)


def places(sequence: Sequence) -> int:
    """Places in the batch that it takes: one for each sample that will run here."""
    return 1 if sequence.prefill_only else 1 + len(sequence.siblings)


def private_pages(sequence: Sequence, wanted: int, page_size: int) -> int:
    """Pages that each sibling needs for itself where the sequence wants `wanted`: all but the full ones of the prompt.

    None where the first token is the last one.
    """
    known = len(sequence.tokens)
    if not sequence.siblings or sequence.prefill_only or sequence.limit <= known + 1:
        return 0
    return wanted - known // page_size
