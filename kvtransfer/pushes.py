"""The tickets that a prefill worker serves: how each goes from permission to its end."""

from collections.abc import Iterable

from .ids import Recent, SeenIds
from .messages import (
    ClosePool,
    Complete,
    Drained,
    FromWriter,
    Instruction,
    Key,
    Progress,
    Release,
    Resend,
    Send,
    Ticketed,
)
from .push import Push, PushState, runs
from .source import Source

_REMEMBERED = 4096  # dead readers


class Peer:
    """A reader: one incarnation of a decode worker."""

    def __init__(self) -> None:
        """Not heard of before."""
        self.up = False
        self.met = False  # was up at least once
        self.dead = False
        self.pool: int | None = None  # None: unknown
        self.pool_pages = 0
        self.seen = SeenIds()
        self.pushes: dict[int, Push] = {}  # by ticket; those that wait too
        self.waiting: dict[Key, Push] = {}


class Pushes:
    """All open tickets, the sequences that they are for, and the readers that gave them."""

    def __init__(self, layers: int, page_size: int, repeat_s: float) -> None:
        """See `Writer`."""
        self.layers = layers
        self.page_size = page_size
        self.repeat_s = repeat_s
        self.now = 0.0  # the latest that was told
        self.peers: dict[int, Peer] = {}
        self.dead = Recent(_REMEMBERED)
        self.sources: dict[Key, Source] = {}
        self.copies: dict[int, Push] = {}  # outstanding ones
        self._last_copy = 0

    def all(self) -> list[Push]:
        """Every open ticket."""
        return [push for peer in self.peers.values() for push in peer.pushes.values()]

    def is_dead(self, reader: int) -> bool:
        """Whether this reader was proven dead."""
        return reader in self.dead or (reader in self.peers and self.peers[reader].dead)

    def send(self, reader: int, message: FromWriter) -> list[Instruction]:
        """To a reader whose link is up; what matters is said again when it is up again."""
        peer = self.peers.get(reader)
        return [Send(reader, message)] if peer is not None and peer.up else []

    def answer(self, push: Push) -> list[Instruction]:
        """Where the ticket stands: the answer to its arrival, whether first or repeated."""
        if push.state is PushState.STOPPING:
            return []
        if push.state is PushState.COMPLETE:
            return self.say_complete(push)
        return self.send(push.reader, Progress(((push.ticket.ticket, *push.progress()),)))

    def serve(self, source: Source, push: Push) -> list[Instruction]:
        """The ticket and its sequence have met: all that is ready is pushed at once."""
        if source.push is not None or source.abandoned:
            return self.stop(push, "the sequence has or had another ticket")
        reason = source.mismatch(push.ticket.first_position, len(push.ticket.pages))
        if reason:
            return [*self.abandon(source), *self.stop(push, reason)]
        source.push = push
        push.state = PushState.PUSHING
        return [Ticketed(source.key), *self.advance(source, push)]

    def advance(self, source: Source, push: Push) -> list[Instruction]:
        """Launches what became ready in any layer, or completes."""
        if source.finished():
            return self.maybe_complete(source, push)
        return self.launch(source, push, range(self.layers)) or self.maybe_complete(source, push)

    def launch(self, source: Source, push: Push, layers: Iterable[int]) -> list[Instruction]:
        """Launches what became ready in these layers: one copy each."""
        out: list[Instruction] = []
        for layer in layers:
            ordinals = push.due(layer, source.whole_pages(layer))
            if ordinals:
                out.append(self._copy(source, push, layer, ordinals))
        return out

    def resend(self, source: Source, push: Push, message: Resend) -> list[Instruction]:
        """Launches these ordinals of all layers again. Once: what fails twice will not come right."""
        if push.round > 0:
            return self.stop(push, "the digests did not match twice")
        if not message.ordinals or not 0 <= min(message.ordinals) <= max(message.ordinals) < len(push.ticket.pages):
            return self.stop(push, "a resend of pages that the ticket does not have")
        push.round += 1
        push.state = PushState.PUSHING
        stretches = list(runs(message.ordinals))
        return [self._copy(source, push, layer, stretch) for layer in range(self.layers) for stretch in stretches]

    def maybe_complete(self, source: Source, push: Push) -> list[Instruction]:
        """Completes if token 0 is known and every copy was seen completed."""
        ready = source.first is not None and (source.finished() or push.all_launched())
        if push.state is not PushState.PUSHING or push.outstanding or not ready:
            return []
        push.state = PushState.COMPLETE
        return self.say_complete(push)

    def say_complete(self, push: Push) -> list[Instruction]:
        """Tells the reader that all is written."""
        source = self.sources[push.ticket.key]
        push.repeat_at = self.now + self.repeat_s
        digests = b"" if source.finished() else push.folded()
        return self.send(push.reader, Complete(push.ticket.ticket, source.first or (), digests, push.round))

    def stop(self, push: Push, reason: str) -> list[Instruction]:
        """Launches nothing more; the ticket is drained when its last copy was seen completed."""
        if push.state is not PushState.STOPPING:
            push.state, push.reason = PushState.STOPPING, reason
        return [] if push.outstanding else self.drain(push)

    def drain(self, push: Push) -> list[Instruction]:
        """No write can come any more: says so and closes the ticket."""
        return [*self.send(push.reader, Drained(push.ticket.ticket, push.reason)), *self.close(push)]

    def close(self, push: Push) -> list[Instruction]:
        """Forgets the ticket and lets its sequence go."""
        peer = self.peers[push.reader]
        del peer.pushes[push.ticket.ticket]
        if peer.waiting.get(push.ticket.key) is push:
            del peer.waiting[push.ticket.key]
        source = self.sources.get(push.ticket.key)
        out = self.abandon(source) if source is not None and source.push is push else []
        return out + self.close_pool(push.reader)

    def abandon(self, source: Source) -> list[Instruction]:
        """Nobody will fetch its KV: releases its pages, now or as soon as the prompt is done."""
        source.push = None
        source.abandoned = True
        if source.first is None:
            return []
        del self.sources[source.key]
        return [Release(source.key)]

    def close_pool(self, reader: int) -> list[Instruction]:
        """Closes a dead reader's pool once none of its tickets has a copy under way, and forgets the reader."""
        peer = self.peers[reader]
        if not peer.dead or peer.pushes:
            return []
        del self.peers[reader]
        self.dead.add(reader)
        return [ClosePool(reader)]

    def faults(self) -> list[str]:
        """Every invariant that does not hold."""
        found = [f"copy {c} of a closed ticket" for c, p in self.copies.items() if c not in p.outstanding]
        for push in self.all():
            name, source = f"ticket {push.ticket.ticket} of {push.reader:x}", self.sources.get(push.ticket.key)
            waits = self.peers[push.reader].waiting.get(push.ticket.key) is push
            if waits != (push.state is PushState.WAITING):
                found.append(f"{name} waits and does not")
            if push.state in (PushState.PUSHING, PushState.COMPLETE) and (source is None or source.push is not push):
                found.append(f"{name} has no sequence")
            if push.outstanding and push.state in (PushState.WAITING, PushState.COMPLETE):
                found.append(f"{name} is {push.state.name} with copies under way")
            if push.state is PushState.STOPPING and not push.outstanding:
                found.append(f"{name} is drained and was not closed")
            if any(self.copies.get(copy) is not push for copy in push.outstanding):
                found.append(f"{name} lost a copy")
        return found

    def _copy(self, source: Source, push: Push, layer: int, ordinals: range) -> Instruction:
        self._last_copy += 1
        self.copies[self._last_copy] = push
        return push.launch(self._last_copy, layer, ordinals, source.pages)
