"""Every live sequence, its state, and its pages: the one place that changes either."""

from collections.abc import Iterator

from .block_pool import BlockPool
from .prefix_cache import PendingPages, extend_chain, page_contents
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
        self.siblings: dict[SequenceKey, Sequence] = {}  # samples that are no sequences yet: the one that carries each
        self.waiting = WaitingQueue()
        self.running: dict[SequenceKey, Sequence] = {}
        self.awaiting: dict[SequenceKey, Sequence] = {}
        self.held: dict[SequenceKey, Sequence] = {}
        self.decode_work = 0  # live DECODE sequences: long prompt chunks would hold their tokens up
        self.constrained = 0  # live sequences whose output is constrained
        self.expected = 0  # places in the batch that admitted sequences keep for their siblings
        self._preempted: list[Sequence] = []
        self._unpublished: list[Sequence] = []

    def add(self, sequence: Sequence) -> None:
        """A new sequence waits."""
        self._extend_chain(sequence)
        self.live[sequence.key] = sequence
        self.siblings.update(dict.fromkeys(sequence.siblings, sequence))
        self.decode_work += sequence.request.work is Work.DECODE
        self.constrained += sequence.matching is not None
        self.waiting.push(sequence)

    def ticketed(self, sequence: Sequence) -> None:
        """Its ticket came: where it waits, it moves up."""
        if sequence.state is not State.WAITING:
            sequence.ticketed = True
            return
        self.waiting.remove(sequence)
        sequence.ticketed = True
        self.waiting.push(sequence)

    def enter(self, sequence: Sequence, hits: list[int], fresh: int, private: int = 0) -> None:
        """Admits a waiting sequence with cached pages (`hits`) and `fresh` new ones; it announces what it will fill.

        `private`: pages set aside for each of its siblings, so that parting cannot fail for want of them.
        """
        self.waiting.remove(sequence)
        self.pool.share(hits)  # first, so that `allocate` does not evict them
        sequence.pages = [*hits, *self.pool.allocate(fresh)]
        for key in sequence.siblings:
            sequence.siblings[key] = self.pool.allocate(private)
        sequence.computed = sequence.launched = len(hits) * self.page_size
        sequence.registered = len(hits)
        sequence.announced = len(sequence.chain)
        self.pending.announce(sequence.group, sequence.chain[len(hits) :], sequence.key)
        sequence.state = State.AWAITING if sequence.remote else State.RUNNING
        (self.awaiting if sequence.remote else self.running)[sequence.key] = sequence
        self.expected += self._places(sequence)

    def arrive(self, sequence: Sequence) -> None:
        """The KV of all positions below `base` is in its pages; others find them from `publish_all` on."""
        del self.awaiting[sequence.key]
        sequence.computed = sequence.launched = sequence.base
        if sequence.siblings:  # they take its pages over as they are
            self.publish(sequence)
        else:
            self._unpublished.append(sequence)
        sequence.state = State.RUNNING
        self.running[sequence.key] = sequence

    def part(self, sequence: Sequence) -> list[Sequence]:
        """Its prompt is computed: from here on each sample that is wanted is a sequence by itself. Returns these.

        They share the full pages. What each has for itself must hold a copy of the last, unfilled page already.
        """
        full = sequence.base // self.page_size
        self.expected -= self._places(sequence)
        siblings, sequence.siblings, sequence.samples = sequence.siblings, {}, 1
        parted = [sequence] if sequence.wanted else []
        for key, private in siblings.items():
            del self.siblings[key]
            self.pool.share(sequence.pages[:full])
            sibling = sequence.sibling(key, [*sequence.pages[:full], *private])
            self.live[key] = self.running[key] = sibling
            self.decode_work += sibling.request.work is Work.DECODE
            self.constrained += sibling.matching is not None
            parted.append(sibling)
        if not sequence.wanted:
            self.drop(sequence)
        return parted

    def disown(self, sequence: Sequence, key: SequenceKey) -> None:
        """One of the samples that it carries is not wanted any more; the sequence ends with the last one."""
        if key == sequence.key:
            sequence.wanted = False
        else:
            self.expected -= self._places(sequence)
            del self.siblings[key]
            self.pool.release(sequence.siblings.pop(key))
            self.expected += self._places(sequence)
        if not sequence.carried():
            self.drop(sequence)

    def _places(self, sequence: Sequence) -> int:
        """Places in the batch that its siblings will need, where they become sequences here."""
        return 0 if sequence.prefill_only or sequence.state is State.WAITING else len(sequence.siblings)

    def grow(self, sequence: Sequence) -> None:
        """One more page, which must be free."""
        sequence.pages.extend(self.pool.allocate(1))

    def publish(self, sequence: Sequence) -> None:
        """Lets others find its full pages: call when everything below `computed` is written for certain."""
        full = sequence.computed // self.page_size
        if not self.caching or full <= sequence.registered:
            return
        self._extend_chain(sequence)
        new = range(sequence.registered, full)
        contents = page_contents(sequence.root, sequence.chain, sequence.tokens, new, self.page_size)
        for index, content in zip(new, contents, strict=True):
            self.pool.register(sequence.pages[index], sequence.chain[index], content)
        self.pending.withdraw(sequence.group, sequence.chain[sequence.registered : full], sequence.key)
        sequence.registered = full

    def publish_all(self) -> None:
        """Of those that arrived or were parked. A long prompt has many pages, and a client waits for its next token."""
        if self._unpublished:
            unpublished, self._unpublished = self._unpublished, []
            for sequence in unpublished:  # one that ended meanwhile has no pages
                self.publish(sequence)

    def park(self, sequence: Sequence) -> None:
        """A PREFILL sequence is done: only its pages are still wanted. Others find them from `publish_all` on."""
        del self.running[sequence.key]
        sequence.state = State.HELD
        self.held[sequence.key] = sequence
        self._unpublished.append(sequence)

    def preempt(self, sequence: Sequence) -> None:
        """Takes a running or held sequence's pages; it recomputes later. It waits from `requeue` on, not earlier."""
        del (self.running if sequence.state is State.RUNNING else self.held)[sequence.key]
        self._give_back(sequence)
        sequence.state = State.WAITING  # after its siblings' places were given back
        sequence.preempted = True
        self._extend_chain(sequence)
        self._preempted.append(sequence)

    def requeue(self) -> list[SequenceKey]:
        """Queues those preempted since the last call. So nobody is admitted in the step that preempted him."""
        preempted, self._preempted = self._preempted, []
        for sequence in preempted:
            self.waiting.push(sequence)
        return [sequence.key for sequence in preempted]

    def drop(self, sequence: Sequence) -> list[SequenceKey]:
        """The sequence ends, in whatever state, with the samples that it carries: all that it owns is given back.

        Returns the names of these.
        """
        carried = sequence.carried()
        del self.live[sequence.key]
        for key in sequence.siblings:
            del self.siblings[key]
        self.decode_work -= sequence.request.work is Work.DECODE
        self.constrained -= sequence.matching is not None
        if sequence.state is State.WAITING:
            self.waiting.remove(sequence)
            return carried
        by_state = {State.RUNNING: self.running, State.AWAITING: self.awaiting, State.HELD: self.held}
        del by_state[sequence.state][sequence.key]
        self._give_back(sequence)
        return carried

    def _give_back(self, sequence: Sequence) -> None:
        """The only way on which a sequence loses its pages. A page under a ticket stays out of use by its hold. What
        was computed others find, and it too where it will compute again.
        """
        self.publish(sequence)
        self.pending.withdraw(sequence.group, sequence.chain[sequence.registered : sequence.announced], sequence.key)
        self.expected -= self._places(sequence)
        pages, sequence.pages, sequence.row = sequence.pages, [], None
        sequence.computed = sequence.launched = sequence.unseen = sequence.registered = sequence.announced = 0
        sequence.stay += 1
        self.pool.release(pages)
        for key, private in sequence.siblings.items():
            self.pool.release(private)
            sequence.siblings[key] = []

    def _extend_chain(self, sequence: Sequence) -> None:
        if self.caching:
            extend_chain(sequence.chain, sequence.root, sequence.tokens, self.page_size)

    def in_batch(self) -> int:
        """Sequences that run or will run once their KV or their prompt is here. Held ones cost pages, but no place."""
        return len(self.running) + len(self.awaiting) + self.expected

    def admitted(self) -> Iterator[Sequence]:
        """All that own pages."""
        yield from self.running.values()
        yield from self.awaiting.values()
        yield from self.held.values()
