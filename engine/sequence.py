"""A sequence in the engine: the request, what has become of it so far, and what it owns."""

from dataclasses import dataclass, field, replace
from enum import Enum

from .batch import Row
from .logit_rules import LogitRules
from .matching import Matching
from .request import Request, SequenceKey, SequenceTimings, Work


class State(Enum):
    """Where a sequence stands; it owns pages in all states but WAITING."""

    WAITING = "waiting"  # for pages, a place in the batch, its ticket, or another sequence's pages
    AWAITING = "awaiting"  # DECODE: its pages are reserved, the KV is on its way
    RUNNING = "running"  # in the batch
    HELD = "held"  # PREFILL: computed; its pages wait to be fetched


@dataclass(slots=True, eq=False)
class Sequence:
    """The scheduler's record of a request. Positions and lengths in tokens."""

    request: Request
    arrival: float  # time.monotonic(), first arrival
    order: int  # counts additions; breaks ties of arrival
    limit: int  # most tokens, prompt and output together
    root: bytes  # of the hash chain
    tokens: list[int]  # prompt, replayed output, new output (a PREFILL sequence's token 0 left out)
    base: int  # length of prompt and replayed output
    state: State = State.WAITING
    pages: list[int] = field(default_factory=list)  # block table; replaced, never edited, while PREFILL
    computed: int = 0  # positions below are written in the pool, for certain
    launched: int = 0  # positions below are, or will be by a step on its way
    unseen: int = 0  # tokens being drawn by a step on its way: 0 or 1
    stay: int = 0  # counts how often it lost its pages: what was launched before is void
    chain: list[bytes] = field(default_factory=list)  # digests of full pages of `tokens`
    registered: int = 0  # leading pages that are in the prefix cache, or whose content is
    announced: int = 0  # leading pages that are registered or pending
    blocked_on: bytes | None = None  # WAITING: digest that another sequence is filling
    rank: int = 0  # WAITING: its standing when it was queued
    ticketed: bool = False
    preempted: bool = False  # lost its pages at least once: a DECODE sequence now computes its KV itself
    reported: bool = False  # PREFILL: token 0 was handed out
    released: bool = False  # PREFILL: nobody will fetch its pages
    scored: int = 1  # prompt positions below have had their log-probabilities told, where they are wanted
    rules: LogitRules | None = None  # made when first needed
    matching: Matching | None = None  # where its output is constrained
    began: float | None = None  # first chunk, or reservation
    timings: SequenceTimings = field(default_factory=SequenceTimings)
    samples: int = 1  # tokens to draw after the prompt; 1 once the samples go their own ways
    # Further samples that are wanted, until they become sequences themselves (those of PREFILL never do), and the pages
    # that each will have for itself: a copy of the last, unfilled page, and room for its first token.
    siblings: dict[SequenceKey, list[int]] = field(default_factory=dict)
    wanted: bool = True  # False: its own sample was cancelled, it runs for its siblings
    ends: frozenset[int] = frozenset()  # tokens that end its output
    row: Row | None = None  # the one of each step while it decodes
    # Of the request: asked for in every step.
    key: SequenceKey = field(init=False)  # its name
    prefill_only: bool = field(init=False)  # its KV is for another worker
    ruled: bool = field(init=False)  # `current_rules` has something to do

    def __post_init__(self) -> None:
        """Takes from the request what is asked for in every step."""
        self.key = self.request.key
        self.prefill_only = self.request.work is Work.PREFILL
        self.ruled = LogitRules.needed(self.request.params)

    @property
    def turn(self) -> tuple[int, float, int]:
        """Sorts the most urgent first, and the oldest of these."""
        return self.request.priority, self.arrival, self.order

    @property
    def remaining(self) -> int:
        """Tokens to launch before the next one can be sampled."""
        return len(self.tokens) + self.unseen - self.launched

    @property
    def decoding(self) -> bool:
        """All but its newest token is written, or will be by a step on its way."""
        return len(self.tokens) + self.unseen > self.base and self.remaining == 1

    @property
    def launchable(self) -> bool:
        """Whether its next tokens can be run before what is on its way has been seen."""
        if not self.unseen:
            return self.remaining > 0
        return self.samples == 1 and not self.prefill_only and len(self.tokens) + 1 < self.limit

    @property
    def unticketed(self) -> bool:
        """PREFILL without a ticket: the first to give pages back."""
        return self.request.work is Work.PREFILL and not self.ticketed

    @property
    def remote(self) -> bool:
        """DECODE whose prompt's KV comes, or came, from a writer."""
        return self.request.work is Work.DECODE and not self.preempted

    @property
    def group(self) -> int | None:
        """Whose pages it may wait for (see `PendingPages`)."""
        return self.request.writer if self.remote else None

    @property
    def unscored(self) -> bool:
        """Log-probabilities of its prompt are still to be computed here: cached KV is of no use to it."""
        request = self.request
        wanted = request.params.prompt_logprobs is not None and request.work is not Work.DECODE
        return wanted and self.scored < len(request.prompt_ids)

    def current_rules(self) -> LogitRules | None:
        """What is to be done to the logits of its next token, brought up to date; None: nothing."""
        if not self.ruled:
            return None
        if self.rules is None:
            self.rules = LogitRules(self.request.params, len(self.request.prompt_ids))
        self.rules.update(self.tokens)
        return self.rules

    @property
    def held(self) -> bool:
        """Its next token cannot be drawn yet: its grammar, or what may come next, is still being made."""
        return self.matching is not None and not self.matching.ready(self.unseen)

    def carried(self) -> list[SequenceKey]:
        """The samples that end with it."""
        return [self.key, *self.siblings] if self.wanted else list(self.siblings)

    def sibling(self, key: SequenceKey, pages: list[int]) -> "Sequence":
        """Another sample of the same prompt, with that block table: from here on it goes its own way."""
        tokens = list(self.tokens)
        return replace(
            self,
            request=replace(self.request, key=key, samples=1),
            order=self.order + key.sample - self.key.sample,
            tokens=tokens,
            matching=self.matching.twin(tokens) if self.matching is not None else None,
            pages=pages,
            chain=list(self.chain),
            rules=None,
            row=None,
            siblings={},
            wanted=True,
            timings=replace(self.timings),
        )

    def next_index(self) -> int:
        """Output index of the next new token."""
        return len(self.tokens) - len(self.request.prompt_ids)
