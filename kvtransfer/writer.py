"""The prefill side's machine of the ticket protocol: events in, instructions out; no clock, no thread, no socket."""

from collections.abc import Sequence

from ..errors import TwostrokeError
from .ids import Recent
from .messages import (
    Accepted,
    ClosePool,
    Drained,
    FirstToken,
    FromReader,
    Instruction,
    Key,
    Progress,
    Resend,
    Revoke,
    Ticket,
)
from .push import Push, PushState
from .pushes import Peer, Pushes
from .source import Source

MAX_WAITING = 1024  # tickets of one reader whose requests have not come
_REMEMBERED = 4096  # requests that are gone


class Writer:
    """All hand-overs of one prefill worker. Every method returns what the caller must do, in order.

    A ticket ends by `Accepted` from the reader or by `Drained` to it; both let go of its sequence: `Release` comes
    once, not before `prompt_done`, and not at all after `request_gone`. Pages are written only between ticket and end,
    each page of each layer once; again only after a `Resend`.
    """

    def __init__(self, *, layers: int, page_size: int, repeat_s: float = 1.0) -> None:
        """`repeat_s`: after so many seconds an unanswered `Complete` is sent again."""
        self._pushes = Pushes(layers, page_size, repeat_s)
        self._gone = Recent(_REMEMBERED)

    # Readers

    def reader_up(self, reader: int, now: float, *, pool: int | None = None, pool_pages: int = 0) -> list[Instruction]:
        """A link to it is open. Tickets must name `pool` and pages of it below `pool_pages`, where these are given.

        Of one that was proven dead before nothing is taken: its pool is closed.
        """
        self._see(now)
        if self._pushes.is_dead(reader):
            return [ClosePool(reader)] if reader in self._pushes.dead else []
        peer = self._pushes.peers.setdefault(reader, Peer())
        peer.up, peer.met, peer.pool, peer.pool_pages = True, True, pool, pool_pages
        complete = [push for push in peer.pushes.values() if push.state is PushState.COMPLETE]
        return [instruction for push in complete for instruction in self._pushes.say_complete(push)]

    def reader_down(self, reader: int, now: float) -> list[Instruction]:
        """Its link is lost. That proves nothing: tickets stay, copies go on."""
        self._see(now)
        if reader in self._pushes.peers:
            self._pushes.peers[reader].up = False
        return []

    def reader_dead(self, reader: int) -> list[Instruction]:
        """It is proven dead: launches nothing more, closes its pool once the launched copies were seen completed."""
        if self._pushes.is_dead(reader):
            return []
        peer = self._pushes.peers.setdefault(reader, Peer())
        peer.up, peer.dead = False, True
        out = self._pushes.close_pool(reader)
        for push in list(peer.pushes.values()):
            out += self._pushes.stop(push, "the reader is dead")
        for source in [s for s in self._pushes.sources.values() if s.reader == reader and s.push is None]:
            out += self._pushes.abandon(source)
        return out

    def receive(self, reader: int, message: FromReader, now: float) -> list[Instruction]:
        """A message of that incarnation."""
        self._see(now)
        if self._pushes.is_dead(reader):
            return []
        peer = self._pushes.peers.setdefault(reader, Peer())
        push = peer.pushes.get(message.ticket)
        match message:
            case Ticket():
                return self._pushes.answer(push) if push is not None else self._take(reader, peer, message)
            case Revoke():
                return self._revoke(reader, peer, message.ticket, push)
            case Accepted():
                complete = push is not None and push.state is PushState.COMPLETE
                return self._pushes.close(push) if push is not None and complete else []
            case Resend():
                return self._resend(reader, message, push)

    def _take(self, reader: int, peer: Peer, ticket: Ticket) -> list[Instruction]:
        """A ticket that is not open: a new one, or one that has ended and never begins again."""
        if not peer.seen.fresh(ticket.ticket):
            return self._pushes.send(reader, Drained(ticket.ticket))
        reason = self._refusal(peer, ticket)
        if reason:
            return self._pushes.send(reader, Drained(ticket.ticket, reason))
        pushes = self._pushes
        push = Push(reader, ticket, pushes.layers, pushes.page_size, pushes.now + ticket.valid_s)
        peer.pushes[ticket.ticket] = push
        source = pushes.sources.get(ticket.key)
        if source is not None:
            return [*pushes.answer(push), *pushes.serve(source, push)]
        peer.waiting[ticket.key] = push
        return pushes.answer(push)

    def _refusal(self, peer: Peer, ticket: Ticket) -> str:
        """Why this ticket is not taken; empty if it is."""
        source = self._pushes.sources.get(ticket.key)
        if not peer.met or (peer.pool is not None and ticket.pool != peer.pool):
            return f"no pool {ticket.pool:016x} of the reader is open"
        if not _fits_pool(ticket.pages, peer.pool_pages) or ticket.first_position % self._pushes.page_size:
            return "page ids are out of range or repeated, or the first position is within a page"
        if ticket.first_position < 0 or ticket.valid_s <= 0:
            return "the first position or the validity is out of range"
        if ticket.key in self._gone:
            return "the request is gone"
        if source is not None and self._pushes.peers.get(source.reader) is not peer:
            return "the request is for another reader"
        if source is None and (ticket.key in peer.waiting or len(peer.waiting) >= MAX_WAITING):
            return "too many tickets wait for their requests"
        return ""

    def _revoke(self, reader: int, peer: Peer, ticket: int, push: Push | None) -> list[Instruction]:
        if push is not None:
            return self._pushes.stop(push, "")
        peer.seen.fresh(ticket)  # a ticket that comes after its revoke is refused
        return self._pushes.send(reader, Drained(ticket))

    def _resend(self, reader: int, message: Resend, push: Push | None) -> list[Instruction]:
        if push is None:
            return self._pushes.send(reader, Drained(message.ticket))
        if push.state is not PushState.COMPLETE or message.round != push.round:
            return []  # a late copy: it was answered
        return self._pushes.resend(self._pushes.sources[push.ticket.key], push, message)

    # The engine

    def expect(self, key: Key, reader: int) -> list[Instruction]:
        """A PREFILL request for `reader` was submitted; a ticket that came before it is served now."""
        pushes = self._pushes
        if key in pushes.sources:
            return []
        self._gone.discard(key)
        source = pushes.sources[key] = Source(key, reader, pushes.layers, pushes.page_size)
        source.abandoned = pushes.is_dead(reader)
        peer = pushes.peers.get(reader)
        push = peer.waiting.pop(key, None) if peer is not None else None
        return pushes.serve(source, push) if push is not None else []

    def pages_ready(self, key: Key, layers: range, pages: Sequence[int], ready: int, total: int) -> list[Instruction]:
        """Positions below `ready` of `total` are written in these layers of the prompt's block table `pages`."""
        source = self._pushes.sources.get(key)
        if source is None or source.abandoned:
            return []
        same = source.advance(layers, pages, ready, total)
        push = source.push
        if push is None or push.state is not PushState.PUSHING:
            return []
        reason = source.mismatch(push.ticket.first_position, len(push.ticket.pages))
        if not same and push.any_launched():
            reason = "the prompt's pages moved under its ticket"
        if reason:
            return self._pushes.stop(push, reason)
        launched = self._pushes.launch(source, push, layers)
        return launched or self._pushes.maybe_complete(source, push)

    def restarted(self, key: Key) -> list[Instruction]:
        """The engine took the sequence's pages (preemption) and will compute them again: nothing of it is ready now.

        Must be called before the next message is received: a ticket is served from what is ready.
        """
        source = self._pushes.sources.get(key)
        if source is None or source.abandoned:
            return []
        source.restart()
        push = source.push
        if push is None or push.state is PushState.STOPPING or not push.any_launched():
            return []
        return self._pushes.stop(push, "the prompt's pages moved under its ticket")

    def prompt_done(self, key: Key, first: tuple[FirstToken, ...]) -> list[Instruction]:
        """Token 0 of each sample; every layer of every page is written."""
        source = self._pushes.sources.get(key)
        if source is None:
            return []
        source.finish(first)
        push = source.push
        if source.abandoned:
            return self._pushes.abandon(source)
        if push is None or push.state is not PushState.PUSHING:
            return []
        reason = source.mismatch(push.ticket.first_position, len(push.ticket.pages))
        return self._pushes.stop(push, reason) if reason else self._pushes.advance(source, push)

    def request_gone(self, key: Key) -> list[Instruction]:
        """The engine dropped it (cancelled, failed) with its pages. Its ticket is drained."""
        self._gone.add(key)
        source = self._pushes.sources.pop(key, None)
        if source is None or source.push is None:
            return []
        return self._pushes.stop(source.push, "the request is gone")

    def copied(self, copy: int, digests: bytes) -> list[Instruction]:
        """The host saw this copy completed; `digests`: 8 bytes for each of its source pages."""
        push = self._pushes.copies.get(copy)
        if push is None:
            return []
        push.landed(copy, digests)
        del self._pushes.copies[copy]
        if push.state is PushState.STOPPING:
            return [] if push.outstanding else self._pushes.drain(push)
        return self._pushes.maybe_complete(self._pushes.sources[push.ticket.key], push)

    def step_ended(self) -> list[Instruction]:
        """Tells each reader, in one message, how far its tickets have come."""
        out: list[Instruction] = []
        for reader, peer in self._pushes.peers.items():
            news = [entry for push in peer.pushes.values() if peer.up for entry in push.news()]
            out += self._pushes.send(reader, Progress(tuple(news))) if news else []
        return out

    def tick(self, now: float) -> list[Instruction]:
        """Expires tickets and repeats unanswered completes."""
        self._see(now)
        out: list[Instruction] = []
        for push in self._pushes.all():
            if push.state is not PushState.STOPPING and now >= push.deadline:
                out += self._pushes.stop(push, "the ticket expired")
            elif push.state is PushState.COMPLETE and now >= push.repeat_at:
                out += self._pushes.say_complete(push)
        return out

    def open_tickets(self) -> int:
        """Tickets that have not ended."""
        return len(self._pushes.all())

    def check(self, *, idle: bool) -> None:
        """Raises TwostrokeError naming every broken invariant; `idle`: nothing at all may be under way."""
        faults = self._pushes.faults()
        if idle and (self._pushes.sources or self._pushes.all()):
            faults.append(f"{len(self._pushes.sources)} sequences and {self.open_tickets()} tickets are left")
        if faults:
            raise TwostrokeError("hand-over: " + "; ".join(faults))

    def _see(self, now: float) -> None:
        self._pushes.now = max(self._pushes.now, now)


def _fits_pool(pages: Sequence[int], pool_pages: int) -> bool:
    """Whether these are distinct pages of a pool of so many (0: unknown), none of them page 0."""
    if not pages:
        return True
    return min(pages) >= 1 and (not pool_pages or max(pages) < pool_pages) and len(set(pages)) == len(pages)
