"""Between the links on the event loop and the hand-over on the engine's thread: what each calls on the other."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from ...kvtransfer.messages import FromReader, FromWriter
from .handover import PeerAddress
from .lane import LaneEnd
from .pool_opener import Opened
from .wire_link import PoolOffer


class ReaderEvents(Protocol):
    """What links tell the prefill side. Called on the event loop in order; must not block."""

    def reader_up(self, reader: int, offer: PoolOffer, opened: Opened) -> None:
        """A link stands. The same transport again after a break, or a new one in the place of one whose access the
        reader has closed; it is the receiver's, to close it once it may.
        """
        ...

    def reader_down(self, reader: int) -> None:
        """The link broke; nothing is proven."""
        ...

    def reader_dead(self, reader: int) -> None:
        """That process is gone for certain."""
        ...

    def received(self, reader: int, message: FromReader) -> None:
        """A message came."""
        ...


class ReaderLinks(Protocol):
    """What the prefill side needs of its links: `LinkServer`."""

    def attach(self, events: ReaderEvents) -> None:
        """Where events go."""
        ...

    def send(self, batches: Mapping[int, Sequence[FromWriter]]) -> None:
        """Messages for readers; on the caller's thread, at once, where a lane leads there and a client waits for it."""
        ...


class WriterEvents(Protocol):
    """What links tell the decode side. Called on the event loop in order; must not block. `received` may come on a
    lane's thread too, in no order with the rest.
    """

    def writer_up(self, writer: int) -> None:
        """A link stands."""
        ...

    def writer_down(self, writer: int) -> None:
        """The link broke; nothing is proven."""
        ...

    def writer_dead(self, writer: int) -> None:
        """That process is gone for certain."""
        ...

    def writer_refused(self, writer: int, reason: str, final: bool) -> None:
        """No link came about; nothing was ever sent but hellos. `final`: none ever will."""
        ...

    def writer_replaced(self, writer: int, reason: str) -> None:
        """Another process answers at its address, and no proof of its death can be had."""
        ...

    def received(self, writer: int, message: FromWriter) -> None:
        """A message came."""
        ...


class WriterLinks(Protocol):
    """What the decode side needs of its links: `LinkClient`."""

    def lane(self, writer: int) -> LaneEnd | None:
        """By which that writer speaks to us, if it does."""
        ...

    def attach(self, events: WriterEvents) -> None:
        """Where events go."""
        ...

    def want(self, peers: Iterable[PeerAddress]) -> None:
        """Links with these shall stand."""
        ...

    def send(self, batches: Mapping[int, Sequence[FromReader]]) -> None:
        """Messages for writers."""
        ...
