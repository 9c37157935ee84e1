"""The queue in front of the batch."""

from bisect import bisect_left, insort
from collections.abc import Iterator

from .request import SequenceKey
from .sequence import Sequence


def _age(sequence: Sequence) -> tuple[float, int]:
    return sequence.age


def _cost(sequence: Sequence) -> int:
    return 0 if sequence.remote else len(sequence.tokens)


class WaitingQueue:
    """Three ranks, each by first arrival: preempted sequences; new ones; PREFILL ones without a ticket.

    Unticketed PREFILL sequences that must not start yet are parked: in no rank until their ticket comes. A preempted
    unticketed one goes back to the last rank, else it would take its pages from the ticketed one that needs them.
    """

    def __init__(self) -> None:
        self._ranks: tuple[list[Sequence], ...] = ([], [], [])
        self._parked: dict[SequenceKey, Sequence] = {}
        self.prompt_tokens = 0  # to be computed here, parked sequences' counted in

    def __len__(self) -> int:
        """Sequences that could be admitted, parked ones not counted."""
        return sum(map(len, self._ranks))

    def push(self, sequence: Sequence) -> None:
        """Queues it by its age and present standing."""
        self.prompt_tokens += _cost(sequence)
        if sequence.unticketed and not sequence.request.start_now:
            self._parked[sequence.key] = sequence
            return
        sequence.rank = 2 if sequence.unticketed else 0 if sequence.preempted else 1
        insort(self._ranks[sequence.rank], sequence, key=_age)

    def remove(self, sequence: Sequence) -> None:
        """Takes it out, wherever it is; its rank is remembered, so its standing may have changed meanwhile."""
        self.prompt_tokens -= _cost(sequence)
        if self._parked.pop(sequence.key, None) is None:
            rank = self._ranks[sequence.rank]
            del rank[bisect_left(rank, sequence.age, key=_age)]

    def total(self) -> int:
        """All waiting sequences, parked ones counted in."""
        return len(self) + len(self._parked)

    def in_order(self) -> Iterator[Sequence]:
        """The admissible ones, first to be admitted first. Removing the one just yielded is allowed."""
        for rank in self._ranks:
            index = 0
            while index < len(rank):
                sequence = rank[index]
                yield sequence
                if index < len(rank) and rank[index] is sequence:
                    index += 1

    def all(self) -> list[Sequence]:
        """Every waiting sequence, parked ones last."""
        return [*(sequence for rank in self._ranks for sequence in rank), *self._parked.values()]
