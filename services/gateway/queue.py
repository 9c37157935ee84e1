"""What is inside a gateway, in places and tokens: the books that admission goes by."""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from .board import Board, Cell
from .drain_rate import DrainRate


@dataclass(slots=True, eq=False)
class Entry:
    """A request inside. What it is charged with is what is still to be done for it."""

    priority: int
    places: int
    order: int = 0  # of arrival
    prompt: int = 0  # tokens still to prefill
    outputs: list[int] = field(default_factory=list)  # tokens still to come, by answer; an expectation
    started: bool = False  # a token came
    charged: bool = True  # its places and tokens are in the books
    displace: Callable[[], None] | None = None  # ends it in favour of a more urgent one

    @property
    def tokens(self) -> int:
        """All that are still to be done."""
        return self.prompt + sum(self.outputs)

    def expected(self, answer: int) -> int:
        """Tokens of an answer that are still to come."""
        return self.outputs[answer] if self.charged else 0


class Queue:
    """One loop owns it."""

    def __init__(self, places: int, clock: Callable[[], float] = time.monotonic, board: Board | None = None) -> None:
        """`places`: for answers, at most. `board`: where processes that share them tell what they have taken."""
        self.most = places
        self.drain = DrainRate(clock)
        self._board = Board() if board is None else board
        self._places = 0
        self._tokens = 0
        self._waiting: dict[Entry, None] = {}  # no token came as yet; oldest first
        self._ahead: Counter[int] = Counter()  # prompt tokens of these, by priority
        self._charged = 0
        self._order = 0

    @property
    def places(self) -> int:
        """Taken in this process."""
        return self._places

    @places.setter
    def places(self, value: int) -> None:
        self._places = value
        self._board.tell(Cell.PLACES, value)

    @property
    def tokens(self) -> int:
        """Charged in this process."""
        return self._tokens

    @tokens.setter
    def tokens(self, value: int) -> None:
        self._tokens = value
        self._board.tell(Cell.TOKENS, value)

    @property
    def all_places(self) -> int:
        """Taken in all processes that share them."""
        return self._board.total(Cell.PLACES)

    @property
    def all_tokens(self) -> int:
        """Charged in all processes."""
        return self._board.total(Cell.TOKENS)

    @property
    def places_rate(self) -> float | None:
        """How many are given back a second, in all processes, as far as this one can tell; None: not known."""
        return _scaled(self.drain.places, self.places, self.all_places)

    @property
    def tokens_rate(self) -> float | None:
        """The same of tokens."""
        return _scaled(self.drain.tokens, self.tokens, self.all_tokens)

    def enter(self, entry: Entry) -> None:
        """Takes its places."""
        self._order += 1
        entry.order = self._order
        self._waiting[entry] = None
        self.places += entry.places
        self._charged += 1
        self.drain.busy(True)

    def expect(self, entry: Entry, prompt: int, output: int, answers: int) -> None:
        """Charges a prompt and so many output tokens of each answer."""
        if not entry.charged:
            return
        entry.prompt, entry.outputs = prompt, [output] * answers
        self.tokens += entry.tokens
        self._ahead[entry.priority] += prompt

    def cached(self, entry: Entry, prompt: int) -> None:
        """No more than `prompt` tokens of its prompt are to be computed."""
        saved = entry.prompt - prompt
        if saved > 0 and entry in self._waiting:
            entry.prompt = prompt
            self.tokens -= saved
            self._ahead[entry.priority] -= saved

    def took(self, entry: Entry, answer: int, tokens: int) -> None:
        """Tokens of an answer came. The first one says that the prompt is computed."""
        if not entry.charged:
            return
        done = min(tokens, entry.outputs[answer])
        entry.outputs[answer] -= done
        if not entry.started:
            entry.started = True
            done += entry.prompt
            self._unwait(entry)
            entry.prompt = 0
        self._done(done)

    def ended(self, entry: Entry, answer: int) -> None:
        """An answer is whole: nothing more will come of it."""
        if entry.charged:
            rest, entry.outputs[answer] = entry.outputs[answer], 0
            self._done(rest)

    def leave(self, entry: Entry) -> None:
        """It is gone, however it ended: whatever it was charged with is free. Idempotent."""
        if not entry.charged:
            return
        self._unwait(entry)
        self.tokens -= entry.tokens
        self.places -= entry.places
        entry.charged, entry.prompt, entry.outputs = False, 0, []
        self.drain.left(0, entry.places if entry.started else 0)
        self._charged -= 1
        if not self._charged:
            self.drain.busy(False)

    def make_room(self, priority: int, *, places: int = 0, tokens: int = 0) -> bool:
        """Displaces waiting requests that are less urgent than `priority`, the least urgent and youngest first, until
        so much is free. False, and none is displaced, where all of them would not do."""
        if max(self._ahead, default=priority) <= priority:
            return False
        behind = [entry for entry in self._waiting if entry.priority > priority and entry.displace is not None]
        victims: list[Entry] = []
        for entry in sorted(behind, key=lambda entry: (entry.priority, entry.order), reverse=True):
            if places <= 0 and tokens <= 0:
                break
            victims.append(entry)
            places -= entry.places
            tokens -= entry.tokens
        if places > 0 or tokens > 0:
            return False
        for entry in victims:
            self.leave(entry)
            if entry.displace is not None:
                entry.displace()
        return True

    def share_ahead(self, priority: int) -> float:
        """Of the prompt tokens that wait, the share of those that go before a newcomer of this priority."""
        waiting = sum(self._ahead.values())
        ahead = sum(tokens for other, tokens in self._ahead.items() if other <= priority)
        return ahead / waiting if waiting else 1.0

    def _done(self, tokens: int) -> None:
        self.tokens -= tokens
        self.drain.left(tokens)

    def _unwait(self, entry: Entry) -> None:
        if entry in self._waiting:
            del self._waiting[entry]
            self._ahead[entry.priority] -= entry.prompt
            if self._ahead[entry.priority] <= 0:
                del self._ahead[entry.priority]


def _scaled(rate: float | None, own: int, everybody: int) -> float | None:
    """What one process measured, for all: as if each gave back as much of what it has."""
    return rate * max(1.0, everybody / own) if rate is not None and own else rate
