"""Every live sequence, its state, and its pages: the one place that changes either."""

from collections.abc import Iterator

from .block_pool import BlockPool
from .prefix_cache import PendingPages, extend_chain
from .request import SequenceKey, Work
from .sequence import Sequence, State
from .waiting import WaitingQueue


class Roster:
    """Moves sequences between their states and keeps pool, prefix cache and pending pages in step with them."""

    def __init__(self, pool: BlockPool, *, page_size: int, caching: bool) -> None:
        """`caching`: whether pages are shared by content."""
        self.pool = pool
        self.page_size = page_size
        self.caching = caching
        self.pending = PendingPages()
        self.live: dict[SequenceKey, Sequence] = {}
        self.waiting = WaitingQueue()
        self.running: dict[SequenceKey, Sequence] = {}
        self.awaiting: dict[SequenceKey, Sequence] = {}
        self.held: dict[SequenceKey, Sequence] = {}
        self.decode_work = 0  # live DECODE sequences: long prompt chunks would hold their tokens up
        self._preempted: list[Sequence] = []

    def add(self, sequence: Sequence) -> None:
        """A new sequence waits."""
        self._extend_chain(sequence)
        self.live[sequence.key] = sequence
        self.decode_work += sequence.request.work is Work.DECODE
        self.waiting.push(sequence)

    def ticketed(self, sequence: Sequence) -> None:
        """Its ticket came: where it waits, it moves up."""
        if sequence.state is not State.WAITING:
            sequence.ticketed = True
            return
        self.waiting.remove(sequence)
        sequence.ticketed = True
        self.waiting.push(sequence)

    def enter(self, sequence: Sequence, hits: list[int], fresh: int) -> None:
        """Admits a waiting sequence with cached pages (`hits`) and `fresh` new ones; it announces what it will fill."""
        self.waiting.remove(sequence)
        self.pool.share(hits)  # first, so that `allocate` does not evict them
        sequence.pages = [*hits, *self.pool.allocate(fresh)]
        sequence.computed = len(hits) * self.page_size
        sequence.registered = len(hits)
        sequence.announced = len(sequence.chain)
        self.pending.announce(sequence.group, sequence.chain[len(hits) :], sequence.key)
        sequence.state = State.AWAITING if sequence.remote else State.RUNNING
        (self.awaiting if sequence.remote else self.running)[sequence.key] = sequence

    def arrive(self, sequence: Sequence) -> None:
        """The KV of all positions below `base` is in its pages."""
        del self.awaiting[sequence.key]
        sequence.computed = sequence.base
        self.publish(sequence)
        sequence.state = State.RUNNING
        self.running[sequence.key] = sequence

    def grow(self, sequence: Sequence) -> None:
        """One more page, which must be free."""
        sequence.pages.extend(self.pool.allocate(1))

    def publish(self, sequence: Sequence) -> None:
        """Lets others find its full pages: call when everything below `computed` is written for certain."""
        full = sequence.computed // self.page_size
        if not self.caching or full <= sequence.registered:
            return
        self._extend_chain(sequence)
        for page, digest in zip(
            sequence.pages[sequence.registered : full], sequence.chain[sequence.registered : full], strict=True
        ):
            self.pool.register(page, digest)
        self.pending.withdraw(sequence.group, sequence.chain[sequence.registered : full], sequence.key)
        sequence.registered = full

    def park(self, sequence: Sequence) -> None:
        """A PREFILL sequence is done: only its pages are still wanted."""
        del self.running[sequence.key]
        sequence.state = State.HELD
        self.held[sequence.key] = sequence

    def preempt(self, sequence: Sequence) -> None:
        """Takes a running or held sequence's pages; it recomputes later. It waits from `requeue` on, not earlier."""
        del (self.running if sequence.state is State.RUNNING else self.held)[sequence.key]
        self._give_back(sequence)
        sequence.state = State.WAITING
        sequence.preempted = True
        self._extend_chain(sequence)
        self._preempted.append(sequence)

    def requeue(self) -> list[SequenceKey]:
        """Queues those preempted since the last call. So nobody is admitted in the step that preempted him."""
        preempted, self._preempted = self._preempted, []
        for sequence in preempted:
            self.waiting.push(sequence)
        return [sequence.key for sequence in preempted]

    def drop(self, sequence: Sequence) -> None:
        """The sequence ends, in whatever state: all that it owns is given back."""
        del self.live[sequence.key]
        self.decode_work -= sequence.request.work is Work.DECODE
        if sequence.state is State.WAITING:
            self.waiting.remove(sequence)
            return
        by_state = {State.RUNNING: self.running, State.AWAITING: self.awaiting, State.HELD: self.held}
        del by_state[sequence.state][sequence.key]
        self._give_back(sequence)

    def _give_back(self, sequence: Sequence) -> None:
        """The only way on which a sequence loses its pages. A page under a ticket stays out of use by its hold."""
        self.pending.withdraw(sequence.group, sequence.chain[sequence.registered : sequence.announced], sequence.key)
        pages, sequence.pages = sequence.pages, []
        sequence.computed = sequence.registered = sequence.announced = 0
        self.pool.release(pages)

    def _extend_chain(self, sequence: Sequence) -> None:
        if self.caching:
            extend_chain(sequence.chain, sequence.root, sequence.tokens, self.page_size)

    def in_batch(self) -> int:
        """Sequences that run or will run once their KV is here. Held ones cost pages, but no place in the batch."""
        return len(self.running) + len(self.awaiting)

    def admitted(self) -> Iterator[Sequence]:
        """All that own pages."""
        yield from self.running.values()
        yield from self.awaiting.values()
        yield from self.held.values()
