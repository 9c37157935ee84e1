"""A request's place inside a gateway: what it is charged with, from the door to its last token."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from ...errors import DeadlineExceeded
from ..security.tenant import Tenant
from .ledger import Cost
from .queue import Entry

CERTAIN = 0.7  # of an estimated wait: what is sure enough to refuse by
TOLD_AT_ONCE = 16  # tokens of an answer that the queue is told of: telling costs as much as a tenth of sending

if TYPE_CHECKING:
    from .admission import Admission


class Place:
    """Handed out by `Admission.slot`, and given back with it."""

    def __init__(self, admission: "Admission", entry: Entry, tenant: Tenant, answers: int) -> None:
        self.tenant = tenant
        self.answers = answers
        self.entry = entry
        self._admission = admission
        self._charged = Cost()
        self._counts = [0] * answers  # output tokens
        self._untold = [0] * answers  # of these, what the queue does not know

    def displaceable(self, end: Callable[[], None]) -> None:
        """From now on `end` is called where a more urgent request takes its place before it has had a token."""
        self.entry.displace = end

    def expect(self, prompt_tokens: int, max_tokens: int) -> None:
        """Charges what is to be done, once that is known: the tenant's minute and the queue. Overloaded where it is
        too much."""
        admission, output = self._admission, self._admission.expected_output(max_tokens)
        cost = Cost(0, prompt_tokens, self.answers * output)
        admission.charge(self.tenant, cost)
        self._charged = cost
        admission.check_tokens(self, prompt_tokens + self.answers * output)
        admission.queue.expect(self.entry, prompt_tokens, output, self.answers)

    def routed(self, prompt_tokens: int, wait_s: float, left_s: float | None) -> None:
        """`prompt_tokens`: that have to be computed, the others being cached. `wait_s`: for which prompts that were
        sent before keep the worker busy; `left_s`: until the deadline. Overloaded where it would pass meanwhile,
        DeadlineExceeded where it has passed."""
        self._admission.queue.cached(self.entry, prompt_tokens)
        wait_s *= self._admission.queue.share_ahead(self.entry.priority)
        if left_s is not None and left_s <= 0:
            raise DeadlineExceeded("the deadline passed")
        if left_s is not None and CERTAIN * wait_s > left_s:
            self._admission.refuse_late(self.tenant, wait_s, left_s)

    def took(self, answer: int, tokens: int) -> None:
        """So many tokens of an answer came."""
        self._counts[answer] += tokens
        untold = self._untold[answer] + tokens
        if untold >= TOLD_AT_ONCE or not self.entry.started or untold == self.entry.expected(answer):
            self._admission.queue.took(self.entry, answer, untold)
            untold = 0
        self._untold[answer] = untold

    def ended(self, answer: int) -> None:
        """An answer is whole."""
        self._admission.queue.ended(self.entry, answer)
        self._admission.output_length.observe(self._counts[answer])

    def settle(self, *, ours: bool) -> None:
        """It is over. `ours`: it failed, and not by the client's doing: a prompt that gave no token costs nothing."""
        if self._charged != Cost():
            made = sum(self._counts)
            free = ours and not made
            used = Cost(0, 0 if free else self._charged.input_tokens, made)
            self._admission.ledger.correct(self.tenant, self._charged, used)
