"""The queue in front of the batch."""

from bisect import bisect_left, insort
from collections.abc import Iterator

from .request import SequenceKey
from .sequence import Sequence

UNTICKETED = 2  # the last rank


def _place(sequence: Sequence) -> tuple[int, int, float, int]:
    """Sorts the first to be admitted first."""
    priority, arrival, order = sequence.turn
    return priority, sequence.rank, arrival, order


def _cost(sequence: Sequence) -> int:
    return 0 if sequence.remote else len(sequence.tokens)


class WaitingQueue:
    """By priority, lower ones first; within one, preempted sequences go before new ones, each by first arrival.

    PREFILL sequences without a ticket come after all others, whatever their priority: what they wait for in the end
    is a decode worker's pages, which a sequence that has a ticket may be holding. Those of them that must not start
    yet are parked: in no queue until their ticket comes. A preempted unticketed one goes back to the last rank, else it
    would take its pages from the ticketed one that needs them.
    """

    def __init__(self) -> None:
        self._queues: tuple[list[Sequence], ...] = ([], [])  # all but the last rank; that one
        self._parked: dict[SequenceKey, Sequence] = {}
        self.prompt_tokens = 0  # to be computed here, parked sequences' counted in

    def __len__(self) -> int:
        """Sequences that could be admitted, parked ones not counted."""
        return sum(map(len, self._queues))

    def push(self, sequence: Sequence) -> None:
        """Queues it by its turn and present standing."""
        self.prompt_tokens += _cost(sequence)
        if sequence.unticketed and not sequence.request.start_now:
            self._parked[sequence.key] = sequence
            return
        sequence.rank = UNTICKETED if sequence.unticketed else 0 if sequence.preempted else 1
        insort(self._queue(sequence), sequence, key=_place)

    def remove(self, sequence: Sequence) -> None:
        """Takes it out, wherever it is; its rank is remembered, so its standing may have changed meanwhile."""
        self.prompt_tokens -= _cost(sequence)
        if self._parked.pop(sequence.key, None) is None:
            queue = self._queue(sequence)
            del queue[bisect_left(queue, _place(sequence), key=_place)]

    def total(self) -> int:
        """All waiting sequences, parked ones counted in."""
        return len(self) + len(self._parked)

    def in_order(self) -> Iterator[Sequence]:
        """The admissible ones, first to be admitted first. Removing the one just yielded is allowed."""
        for queue in self._queues:
            index = 0
            while index < len(queue):
                sequence = queue[index]
                yield sequence
                if index < len(queue) and queue[index] is sequence:
                    index += 1

    def all(self) -> list[Sequence]:
        """Every waiting sequence, parked ones last."""
        return [*(sequence for queue in self._queues for sequence in queue), *self._parked.values()]

    def _queue(self, sequence: Sequence) -> list[Sequence]:
        return self._queues[sequence.rank == UNTICKETED]
