"""What the next step runs: who keeps a place, who gets one, and how the token budget is shared."""

from dataclasses import dataclass, field

from .admission import Admission
from .batch import UNSEEN, Row, Scoring
from .config import EngineOptions
from .request import ChunkProgress, Reservation, SequenceKey
from .roster import Roster
from .sequence import Sequence


@dataclass(slots=True)
class Schedule:
    """One step's decisions; `sequences[i]` is the one that `rows[i]` belongs to."""

    rows: list[Row] = field(default_factory=list)
    sequences: list[Sequence] = field(default_factory=list)
    reserved: list[Reservation] = field(default_factory=list)
    preempted: list[SequenceKey] = field(default_factory=list)
    decoding: int = 0  # rows of sequences that decode, the first ones
    prompt_tokens: int = 0  # in the others
    draws: int = 0  # tokens to be drawn
    constrained: bool = False  # some are drawn under a constraint
    decisive: bool = False  # its tokens decide on the logits of the next step, which cannot be launched behind it


class Scheduler:
    """Decode rows first, then prompt chunks with what is left of the budget.

    Within a priority nobody starves: a growing sequence takes pages only from younger ones, so the oldest always goes
    on; and the oldest prompt in the batch always gets at least half of the chunk budget B, so that its last R tokens
    are run within ceil(R / ceil(B / 2)) steps, however many short ones come by. Priorities are strict: while more
    urgent ones can use pages and budget, the others wait, without end if need be.
    """

    def __init__(self, roster: Roster, options: EngineOptions) -> None:
        self._roster = roster
        self._token_budget = options.token_budget
        self._decode_prefill_budget = options.decode_prefill_budget
        self._prompt_batch = options.prompt_batch
        self.admission = Admission(roster, options)

    def schedule(self, now: float) -> Schedule:
        """Decides one step; pages are moved, nothing is computed. A step before it may still be on its way."""
        plan = Schedule()
        self._grow()
        plan.reserved = self.admission.admit(now)
        decoding, prompts = self._ready()
        if self._roster.constrained:
            decoding = [sequence for sequence in decoding if not sequence.held]
            prompts = [sequence for sequence in prompts if not sequence.held]
        plan.sequences = decoding
        plan.rows = [decode_row(sequence) for sequence in decoding]
        plan.decoding = plan.draws = len(decoding)
        budget = self._chunk_budget(len(decoding))
        enough = budget if decoding else self._prompt_batch  # each step more would hold up those that decode
        for sequence, tokens in share_budget(prompts, budget, enough):
            self._append_row(plan, sequence, tokens, now)
        plan.decisive = bool([row for row in plan.rows if row.rules is not None])
        if self._roster.constrained:
            plan.constrained = any(row.matching is not None for row in plan.rows)
        plan.preempted = self._roster.requeue()
        return plan

    def _ready(self) -> tuple[list[Sequence], list[Sequence]]:
        """Those that decode now, and those whose prompts go on. What `launchable` and `decoding` say, asked of each
        sequence in each step; those without a page for their next token are left out."""
        page_size = self._roster.page_size
        decoding: list[Sequence] = []
        prompts: list[Sequence] = []
        for sequence in self._roster.running.values():
            known, launched = len(sequence.tokens), sequence.launched
            if sequence.unseen:
                if sequence.samples != 1 or sequence.prefill_only or known + 1 >= sequence.limit:
                    continue
                known += 1
            if known - launched != 1 or known <= sequence.base:
                if known > launched:
                    prompts.append(sequence)
            elif launched < len(sequence.pages) * page_size:
                decoding.append(sequence)
        return decoding, prompts

    def _grow(self) -> None:
        """Gives each decoding sequence the page for its next token, those whose turn is first first."""
        page_size = self._roster.page_size
        full = [s for s in self._roster.running.values() if s.launched >= len(s.pages) * page_size]
        short = [s for s in full if s.decoding and s.launchable]
        for sequence in sorted(short, key=lambda sequence: sequence.turn):
            if sequence.key in self._roster.running and self._find_page(sequence):
                self._roster.grow(sequence)

    def _find_page(self, sequence: Sequence) -> bool:
        """Makes one page free; False when `sequence` had to go, being the last, or when pages are free soon."""
        while self._roster.pool.free_pages == 0:
            if self._roster.pool.retiring:
                return False
            victim = self._last()
            self._roster.preempt(victim)
            if victim is sequence:
                return False
        return True

    def _last(self) -> Sequence:
        """The least urgent, and the youngest of these, that may be preempted. Ticketed pages and such as are still
        being written are never taken."""
        roster = self._roster
        candidates = [s for s in roster.running.values() if s.unticketed or not s.prefill_only]
        candidates += [s for s in roster.held.values() if s.unticketed]
        return max(candidates, key=lambda sequence: sequence.turn)

    def _chunk_budget(self, decoding: int) -> int:
        left = self._token_budget - decoding
        if self._roster.decode_work:
            left = min(left, self._decode_prefill_budget)
        return max(left, 1)

    def _append_row(self, plan: Schedule, sequence: Sequence, tokens: int, now: float) -> None:
        if sequence.began is None:
            sequence.began = now
            sequence.timings.queue = now - sequence.arrival
        start, end = sequence.launched, sequence.launched + tokens
        progress = None
        if sequence.prefill_only:
            progress = ChunkProgress(sequence.key, sequence.pages, end, sequence.base)
        sample = end == len(sequence.tokens) + sequence.unseen and not sequence.reported
        token_ids = sequence.tokens[start:end] or [UNSEEN]
        row = Row(sequence.key, token_ids, start, sequence.pages, sequence.request.params, sample, progress)
        row.rules = sequence.current_rules() if sample else None
        row.matching = sequence.matching if sample else None
        row.scoring = scoring_of(sequence, start, end) if sequence.unscored else None
        row.samples = sequence.samples
        plan.rows.append(row)
        plan.sequences.append(sequence)
        plan.prompt_tokens += tokens
        plan.draws += row.samples if sample else 0


def decode_row(sequence: Sequence) -> Row:
    """The row of a sequence that decodes: the same one as long as it has its pages, because there are many."""
    row = sequence.row
    if row is None or row.pages is not sequence.pages:
        row = Row(sequence.key, [UNSEEN], 0, sequence.pages, sequence.request.params, True)
        row.matching = sequence.matching
        sequence.row = row
    row.start = sequence.launched
    row.token_ids[0] = UNSEEN if sequence.unseen else sequence.tokens[-1]
    if sequence.ruled:
        row.rules = sequence.current_rules()
    return row


def scoring_of(sequence: Sequence, start: int, end: int) -> Scoring | None:
    """The prompt log-probabilities that running positions start .. end - 1 gives, less those that were told."""
    prompt = sequence.request.prompt_ids
    first = max(start + 1, sequence.scored)
    targets = prompt[first : end + 1]
    return Scoring(first, targets, sequence.request.params.prompt_logprobs or 0) if targets else None


def _shortest(sequence: Sequence) -> tuple[int, int, tuple[int, float, int]]:
    return sequence.request.priority, sequence.remaining, sequence.turn


def share_budget(prompts: list[Sequence], budget: int, enough: int) -> list[tuple[Sequence, int]]:
    """How many tokens of which prompt to run: half to the one whose turn it is, the rest by priority, and among equals
    by shortest remaining time first.

    So a short prompt is done in a step or two beside one of any length. Those that join it, or each other, are no more
    than come to `enough` tokens: from there on a step takes longer in proportion, and all would wait for the last one.
    Returns sequences with at least one token.
    """
    if not prompts:
        return []
    first = min(prompts, key=lambda sequence: sequence.turn)
    shares = {first.key: min(first.remaining, (budget + 1) // 2)}
    left = budget - shares[first.key]
    joined = shares[first.key] if shares[first.key] == first.remaining else 0
    for sequence in sorted(prompts, key=_shortest):
        if joined >= enough and sequence is not first:
            continue
        taken = shares.get(sequence.key, 0)
        more = min(sequence.remaining - taken, left)
        shares[sequence.key] = taken + more
        joined += 0 if sequence is first else more
        left -= more
    return [(sequence, shares[sequence.key]) for sequence in prompts if shares.get(sequence.key)]
