"""A ticket on the decode side: what was said of it, which of its pages were digested."""

from dataclasses import replace
from enum import Enum, auto

from ..kernels.digest import DIGEST_BYTES, fold_layers
from .ids import Recent
from .messages import Complete, FromReader, Key, Resend, Revoke, Ticket, Verify
from .push import runs

_REMEMBERED = 4096  # accepted tickets of a writer


class ArrivalState(Enum):
    """Where a ticket stands."""

    OPEN = auto()  # its writer may write
    VERIFYING = auto()  # complete: the writer writes no more; own digests are still being computed
    RESENT = auto()  # as OPEN, for the pages whose digests did not match
    REVOKING = auto()  # given up; its writer may still write, until it says that it is drained or is proven dead


class Arrival:
    """One ticket. Its pages are digested as they arrive, so that little is left to do when it completes."""

    def __init__(self, writer: int, ticket: Ticket, layers: int, deadline: float) -> None:
        """`deadline`: when it expires, in the reader's monotonic seconds."""
        self.writer = writer
        self.ticket = ticket
        self.deadline = deadline
        self.state = ArrivalState.OPEN
        self.round = 0  # of the `Complete` that is awaited or being verified
        self.complete: Complete | None = None  # the one being verified
        self.resend: Resend | None = None  # what was asked for when it did not match
        self.drained = False  # while VERIFYING: the writer closed the ticket or is dead, there is no second try
        self.answered = False  # the writer has shown that it has the ticket
        self.repeat_at = 0.0  # of `Ticket` or `Revoke`
        self._layers = layers
        self._digests = bytearray(layers * len(ticket.pages) * DIGEST_BYTES)
        self._folded = b""  # not made up
        self._asked = [0] * layers  # leading ordinals whose digests were asked for, by layer
        self._outstanding: set[tuple[int, int, int, int]] = set()  # (first_layer, layers, ordinal, pages)

    @property
    def key(self) -> Key:
        """The sequence's."""
        return self.ticket.key

    def message(self, now: float) -> FromReader | None:
        """What the writer must know of this ticket at present."""
        match self.state:
            case ArrivalState.OPEN:
                return replace(self.ticket, valid_s=max(self.deadline - now, 0.001))
            case ArrivalState.RESENT:
                return self.resend
            case ArrivalState.REVOKING:
                return Revoke(self.ticket.ticket)
            case ArrivalState.VERIFYING:
                return None

    def verify(self, layers: int, pages: int) -> list[Verify]:
        """Asks for the digests of the leading `pages` of the leading `layers` that were not asked for yet."""
        layers, pages = min(layers, self._layers), min(pages, len(self.ticket.pages))
        out: list[Verify] = []
        layer = 0
        while layer < layers:
            start, first = self._asked[layer], layer
            while layer < layers and self._asked[layer] == start:
                layer += 1
            if start < pages:
                self._asked[first:layer] = [pages] * (layer - first)
                out.append(self._ask(first, layer - first, range(start, pages)))
        return out

    def verify_rest(self) -> list[Verify]:
        """Asks for all that is missing, resent pages included."""
        out = self.verify(self._layers, len(self.ticket.pages))
        again = runs(self.resend.ordinals) if self.resend is not None else ()
        return out + [self._ask(0, self._layers, stretch) for stretch in again]

    def digested(self, asked: tuple[int, int, int, int], digests: bytes) -> bool:
        """Takes an answer, (first_layer, layers, ordinal, pages); False if it was not asked for (any more)."""
        first_layer, layers, ordinal, pages = asked
        if asked not in self._outstanding or len(digests) != layers * pages * DIGEST_BYTES:
            return False
        self._outstanding.discard(asked)
        width = pages * DIGEST_BYTES
        for i in range(layers):
            start = ((first_layer + i) * len(self.ticket.pages) + ordinal) * DIGEST_BYTES
            self._digests[start : start + width] = digests[i * width : (i + 1) * width]
        self._folded = b"" if self._outstanding else self._fold()  # early, for a client waits when it is asked
        return True

    def _fold(self) -> bytes:
        return fold_layers(bytes(self._digests), len(self.ticket.pages))

    def waiting(self) -> bool:
        """Whether its sequence still waits for the KV."""
        return self.state is not ArrivalState.REVOKING

    def verified(self) -> bool:
        """Whether it is complete and every own digest is there."""
        return self.state is ArrivalState.VERIFYING and not self._outstanding

    def wrong(self, digests: bytes) -> tuple[int, ...]:
        """Ordinals whose digest, folded over the layers, differs from the writer's."""
        own = self._folded or self._fold()
        if own == digests:
            return ()
        starts = range(0, len(own), DIGEST_BYTES)
        return tuple(i for i, at in enumerate(starts) if own[at : at + DIGEST_BYTES] != digests[at : at + DIGEST_BYTES])

    def _ask(self, first_layer: int, layers: int, ordinals: range) -> Verify:
        self._outstanding.add((first_layer, layers, ordinals.start, len(ordinals)))
        pages = self.ticket.pages[ordinals.start : ordinals.stop]
        return Verify(self.writer, self.ticket.ticket, first_layer, layers, ordinals.start, pages)


class WriterPeer:
    """A writer: one incarnation of a prefill worker, and its tickets."""

    def __init__(self) -> None:
        """Not heard of before."""
        self.up = False
        self.dead = False
        self.last_ticket = 0
        self.arrivals: dict[int, Arrival] = {}  # by ticket
        self.accepted = Recent(_REMEMBERED)
