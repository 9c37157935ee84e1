"""The decode side's machine of the ticket protocol: events in, instructions out; no clock, no thread, no socket."""

from collections.abc import Sequence

from ..errors import TwostrokeError
from .arrival import Arrival, ArrivalState, WriterPeer
from .ids import Recent
from .messages import (
    Accepted,
    Arrived,
    Complete,
    Drained,
    FromReader,
    FromWriter,
    Instruction,
    Key,
    Lost,
    Progress,
    Resend,
    Revoke,
    Send,
    Ticket,
    Unhold,
)

_REMEMBERED = 4096  # dead writers


class Mismatches:
    """What did not arrive whole, by its digests, since the start."""

    def __init__(self) -> None:
        """Nothing."""
        self.pages = 0  # all layers of a page counted as one; one that was sent again in vain counts twice
        self.resent = 0  # of these, asked for again
        self.tickets = 0  # given up because what was sent again did not match either


class Reader:
    """All hand-overs of one decode worker. Every method returns what the caller must do, in order.

    A ticket's sequence ends in exactly one of `Arrived`, `Lost`, or the caller's own `request_gone`. The hold on its
    pages ends by exactly one `Unhold`, which comes only when its writer cannot write them any more: it completed the
    ticket, said that it is drained, or is proven dead. Between a `Lost` and its `Unhold` the pages are in quarantine.
    """

    def __init__(self, *, layers: int, page_size: int, pool: int, valid_s: float = 60.0, repeat_s: float = 1.0) -> None:
        """`pool`: its name in tickets. `valid_s`: a ticket's life. `repeat_s`: of what a writer did not answer."""
        self.mismatches = Mismatches()
        self._layers = layers
        self._page_size = page_size
        self._pool = pool
        self._valid_s = valid_s
        self._repeat_s = repeat_s
        self._peers: dict[int, WriterPeer] = {}
        self._dead = Recent(_REMEMBERED)
        self._keys: dict[Key, Arrival] = {}  # of sequences that still wait for their KV

    # Writers

    def writer_up(self, writer: int, now: float) -> list[Instruction]:
        """A link to it is open: says again what it may have missed."""
        if self._is_dead(writer):
            return []
        peer = self._peers.setdefault(writer, WriterPeer())
        peer.up = True
        return [instruction for arrival in peer.arrivals.values() for instruction in self._say(arrival, now)]

    def writer_down(self, writer: int, now: float) -> list[Instruction]:
        """Its link is lost. That proves nothing: every page stays held."""
        if writer in self._peers:
            self._peers[writer].up = False
        return []

    def writer_dead(self, writer: int) -> list[Instruction]:
        """It is proven dead: no write of its comes any more. What it completed before counts."""
        if self._is_dead(writer):
            return []
        peer = self._peers.setdefault(writer, WriterPeer())
        peer.up, peer.dead = False, True
        out: list[Instruction] = []
        for arrival in list(peer.arrivals.values()):
            out += self._writes_ended(arrival, "the prefill worker is gone")
        self._forget(writer)
        return out

    def receive(self, writer: int, message: FromWriter, now: float) -> list[Instruction]:
        """A message of that incarnation."""
        peer = self._peers.get(writer)
        if peer is None or peer.dead:
            return []
        match message:
            case Progress():
                return [i for entry in message.entries for i in self._progress(peer, *entry)]
            case Complete():
                return self._complete(writer, peer, message)
            case Drained():
                arrival = peer.arrivals.get(message.ticket)
                reason = message.reason or "the prefill worker closed the ticket"
                return self._writes_ended(arrival, reason) if arrival is not None else []

    # Sequences

    def open(
        self, writer: int, key: Key, pages: Sequence[int], first_position: int, now: float
    ) -> tuple[int, list[Instruction]]:
        """A ticket for `pages` (may be empty), which hold the prompt from `first_position` on; returns its number.

        The caller holds the pages for (writer, ticket) before it carries out the instructions. Raises ValueError when
        the sequence has a ticket already or the position is within a page.
        """
        if key in self._keys or first_position % self._page_size or first_position < 0:
            raise ValueError(f"a second ticket, or one from within a page ({first_position})")
        peer = self._peers.setdefault(writer, WriterPeer())
        peer.last_ticket += 1
        ticket = Ticket(peer.last_ticket, key, self._pool, tuple(pages), first_position, self._valid_s)
        arrival = Arrival(writer, ticket, self._layers, now + self._valid_s)
        peer.arrivals[ticket.ticket] = self._keys[key] = arrival
        if self._is_dead(writer):
            peer.dead = True
            return ticket.ticket, self._writes_ended(arrival, "the prefill worker is gone")
        return ticket.ticket, self._say(arrival, now)

    def request_gone(self, key: Key, now: float) -> list[Instruction]:
        """The sequence was cancelled or failed; its pages stay held until `Unhold`."""
        arrival = self._keys.pop(key, None)
        return self._give_up(arrival, now) if arrival is not None else []

    def digested(
        self, writer: int, ticket: int, first_layer: int, ordinal: int, digests: bytes, layers: int, pages: int
    ) -> list[Instruction]:
        """Answers a `Verify` with the digests, layer by layer."""
        arrival = self._peers[writer].arrivals.get(ticket) if writer in self._peers else None
        if arrival is None or not arrival.digested((first_layer, layers, ordinal, pages), digests):
            return []
        return self._judge(arrival)

    def nearly_there(self, writer: int, ticket: int, layers: int, pages: int) -> bool:
        """Whether all pages of that ticket have come in most layers, as `Progress` tells: the rest follows soon."""
        arrival = self._peers[writer].arrivals.get(ticket) if writer in self._peers else None
        return (
            arrival is not None
            and arrival.waiting()
            and pages >= len(arrival.ticket.pages)
            and 8 * layers >= 7 * self._layers
        )

    def tick(self, now: float) -> list[Instruction]:
        """Expires tickets and repeats what was not answered."""
        out: list[Instruction] = []
        for arrival in [a for peer in self._peers.values() for a in peer.arrivals.values()]:
            if arrival.state in (ArrivalState.OPEN, ArrivalState.RESENT) and now >= arrival.deadline:
                out += [*self._lose(arrival, "the KV did not arrive in time"), *self._give_up(arrival, now)]
            elif now >= arrival.repeat_at and not arrival.answered:
                out += self._say(arrival, now)
        return out

    def open_tickets(self) -> int:
        """Tickets whose pages are held."""
        return sum(len(peer.arrivals) for peer in self._peers.values())

    def check(self, *, idle: bool) -> None:
        """Raises TwostrokeError naming every broken invariant; `idle`: no ticket may be open."""
        waiting = [a for peer in self._peers.values() for a in peer.arrivals.values() if a.waiting()]
        faults = [f"ticket {a.ticket.ticket} has no sequence" for a in waiting if self._keys.get(a.key) is not a]
        faults += [f"{key} waits for a closed ticket" for key, a in self._keys.items() if a not in waiting]
        faults += [f"ticket {a.ticket.ticket} is verified and was not closed" for a in waiting if a.verified()]
        if idle and self.open_tickets():
            faults.append(f"{self.open_tickets()} tickets are left")
        if faults:
            raise TwostrokeError("hand-over: " + "; ".join(faults))

    # Inside

    def _progress(self, peer: WriterPeer, ticket: int, layers: int, pages: int) -> list[Instruction]:
        arrival = peer.arrivals.get(ticket)
        if arrival is None or arrival.state is not ArrivalState.OPEN:
            return []
        arrival.answered = True
        return list(arrival.verify(layers, pages))

    def _complete(self, writer: int, peer: WriterPeer, message: Complete) -> list[Instruction]:
        arrival = peer.arrivals.get(message.ticket)
        if arrival is None:
            return self._complete_again(writer, peer, message.ticket)
        if message.round != arrival.round or arrival.state is ArrivalState.VERIFYING:
            return []  # an older round's says nothing of the writes of this one
        if arrival.state is ArrivalState.REVOKING:
            return [*self._send(writer, Revoke(message.ticket)), *self._close(arrival)]
        arrival.state, arrival.complete, arrival.answered = ArrivalState.VERIFYING, message, True
        return self._verify(arrival, message)

    def _complete_again(self, writer: int, peer: WriterPeer, ticket: int) -> list[Instruction]:
        """The ticket is closed, but the writer has not heard of it. Numbers never given out are not answered."""
        if ticket > peer.last_ticket:
            return []
        return self._send(writer, Accepted(ticket) if ticket in peer.accepted else Revoke(ticket))

    def _verify(self, arrival: Arrival, message: Complete) -> list[Instruction]:
        if not message.first_tokens:
            return self._refuse(arrival, "the hand-over lacks token 0")
        if all(token.finish for token in message.first_tokens):
            return self._accept(arrival, message, verified=False)
        return list(arrival.verify_rest()) or self._judge(arrival)

    def _judge(self, arrival: Arrival) -> list[Instruction]:
        """Ends the verification once the last own digest is there."""
        message = arrival.complete
        if message is None or not arrival.verified():
            return []
        wrong = arrival.wrong(message.digests)
        if not wrong:
            return self._accept(arrival, message, verified=True)
        self.mismatches.pages += len(wrong)
        if arrival.round > 0 or arrival.drained:
            self.mismatches.tickets += 1
            return self._refuse(arrival, f"the digests of {len(wrong)} pages did not match")
        self.mismatches.resent += len(wrong)
        arrival.resend = Resend(arrival.ticket.ticket, wrong, arrival.round)
        arrival.state, arrival.round, arrival.answered = ArrivalState.RESENT, arrival.round + 1, False
        return self._send(arrival.writer, arrival.resend)

    def _accept(self, arrival: Arrival, message: Complete, *, verified: bool) -> list[Instruction]:
        self._peers[arrival.writer].accepted.add(arrival.ticket.ticket)
        said = self._send(arrival.writer, Accepted(arrival.ticket.ticket))
        closed = self._close(arrival)  # a client waits for its sequence, for its pages nobody does
        return [*said, Arrived(arrival.key, message.first_tokens, verified), *closed]

    def _refuse(self, arrival: Arrival, reason: str) -> list[Instruction]:
        """A complete ticket whose KV cannot be used."""
        said = self._send(arrival.writer, Revoke(arrival.ticket.ticket))
        return [*self._lose(arrival, reason), *said, *self._close(arrival)]

    def _give_up(self, arrival: Arrival, now: float) -> list[Instruction]:
        """Revokes. The pages are free at once only if the writer has completed them."""
        if arrival.state is ArrivalState.VERIFYING:
            return [*self._send(arrival.writer, Revoke(arrival.ticket.ticket)), *self._close(arrival)]
        arrival.state = ArrivalState.REVOKING
        return self._say(arrival, now)

    def _writes_ended(self, arrival: Arrival, reason: str) -> list[Instruction]:
        """The writer has closed the ticket or is dead."""
        if arrival.state is ArrivalState.VERIFYING:
            arrival.drained = True
            return []
        lost = self._lose(arrival, reason) if arrival.waiting() else []
        return [*lost, *self._close(arrival)]

    def _lose(self, arrival: Arrival, reason: str) -> list[Instruction]:
        del self._keys[arrival.key]
        return [Lost(arrival.key, reason)]

    def _close(self, arrival: Arrival) -> list[Instruction]:
        """Forgets the ticket: its writer cannot write any more."""
        del self._peers[arrival.writer].arrivals[arrival.ticket.ticket]
        if self._keys.get(arrival.key) is arrival:
            del self._keys[arrival.key]
        self._forget(arrival.writer)
        return [Unhold(arrival.writer, arrival.ticket.ticket)]

    def _forget(self, writer: int) -> None:
        """Forgets a dead writer with its last ticket."""
        peer = self._peers.get(writer)
        if peer is not None and peer.dead and not peer.arrivals:
            del self._peers[writer]
            self._dead.add(writer)

    def _say(self, arrival: Arrival, now: float) -> list[Instruction]:
        """Sends what the writer must know of this ticket, to be repeated until it shows that it does."""
        arrival.answered, arrival.repeat_at = False, now + self._repeat_s
        message = arrival.message(now)
        return self._send(arrival.writer, message) if message is not None else []

    def _send(self, writer: int, message: FromReader) -> list[Instruction]:
        """To a writer whose link is up; `writer_up` says again what matters."""
        peer = self._peers.get(writer)
        return [Send(writer, message)] if peer is not None and peer.up else []

    def _is_dead(self, writer: int) -> bool:
        return writer in self._dead or (writer in self._peers and self._peers[writer].dead)
