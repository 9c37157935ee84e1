"""Which way a pool is opened by, and what it must give."""

from collections.abc import Callable

import pytest

from twostroke.errors import Mismatch, Unavailable
from twostroke.kvtransfer.messages import Copy
from twostroke.kvtransfer.transport import Done
from twostroke.services.handover.pool_opener import Broken, Opened, PoolOpener
from twostroke.services.handover.wire_link import PoolOffer

READER = 9
OFFER = PoolOffer(1, 8, 64, b"path", "shm", (("nixl", b""), ("cuda_ipc", b"handle")))
LARGE = PoolOffer(1, 8, 1 << 20, b"path", "shm")


class Way:
    """A transport that only knows how fast it is; each probe takes the next figure."""

    def __init__(self, kind: str, *speeds: float) -> None:
        self.kind = kind
        self.speeds = list(speeds)
        self.closed = False

    def start(self, copy: Copy, done: Done) -> None:
        raise NotImplementedError

    def probe(self) -> float:
        return self.speeds.pop(0)

    def peer_gone(self) -> None:
        raise NotImplementedError

    def close(self) -> None:
        self.closed = True


def opens(way: Way, seen: list[PoolOffer] | None = None) -> Callable[[PoolOffer, int, Broken], Way]:
    def open_pool(offer: PoolOffer, incarnation: int, broken: Broken) -> Way:
        assert (offer.transport, offer.further, incarnation) == (way.kind, (), READER)
        if seen is not None:
            seen.append(offer)
        return way

    return open_pool


def fails(error: Exception) -> Callable[[PoolOffer, int, Broken], Way]:
    def open_pool(offer: PoolOffer, incarnation: int, broken: Broken) -> Way:
        raise error

    return open_pool


def nothing() -> None:
    """Nobody listens."""


def test_the_first_way_that_both_have() -> None:
    shm, cuda = Way("shm", 3.0), Way("cuda_ipc", 300.0)
    opened = PoolOpener({"cuda_ipc": opens(cuda), "shm": opens(shm)}).open(OFFER, READER, nothing)
    assert opened == Opened(shm, 3.0)
    assert PoolOpener({"cuda_ipc": opens(cuda)}).open(OFFER, READER, nothing) == Opened(cuda, 300.0)


@pytest.mark.parametrize("error", [Mismatch("no"), OSError(2, "gone"), ValueError("odd")])
def test_a_way_that_fails_leaves_it_to_the_next(error: Exception) -> None:
    nixl, seen = Way("nixl", 1.0), list[PoolOffer]()
    opener = PoolOpener({"shm": fails(error), "nixl": opens(nixl, seen)})
    assert opener.open(OFFER, READER, nothing) == "nixl"  # its descriptor must be made for us
    assert not seen
    export = PoolOffer(1, 8, 64, b"export", "nixl")
    assert opener.open_export(export, READER, nothing) == Opened(nixl, 1.0)
    assert seen == [export]


def test_what_is_lacking_for_the_moment_is_no_reason_for_another_way() -> None:
    opener = PoolOpener({"shm": fails(Unavailable("no memory")), "nixl": opens(Way("nixl", 1.0))})
    with pytest.raises(Unavailable, match="no memory"):
        opener.open(OFFER, READER, nothing)


def test_a_mismatch_names_what_either_side_has_and_why_it_does_not_do() -> None:
    with pytest.raises(Mismatch, match=r"transports: shm here, shm, nixl, cuda_ipc there; shm: another user's"):
        PoolOpener({"shm": fails(Mismatch("another user's"))}).open(OFFER, READER, nothing)
    with pytest.raises(Mismatch, match=r"transports: cuda_ipc here, shm there"):
        PoolOpener({"cuda_ipc": opens(Way("cuda_ipc", 1.0))}).open(PoolOffer(1, 8, 64, b"x"), READER, nothing)
    with pytest.raises(Mismatch, match="nixl there"):
        PoolOpener({"shm": opens(Way("shm", 1.0))}).open_export(PoolOffer(1, 8, 64, b"x", "nixl"), READER, nothing)


@pytest.mark.parametrize(("page_bytes", "wanted"), [(8192, 2.14), (1 << 18, 8.97), (1 << 24, 9.98)])
def test_of_small_pages_less_is_expected(page_bytes: int, wanted: float) -> None:
    offer = PoolOffer(1, 8, page_bytes, b"path", "shm")
    least = {"shm": 10.0}
    assert isinstance(
        PoolOpener({"shm": opens(Way("shm", wanted + 0.02))}, least=least).open(offer, READER, nothing), Opened
    )
    slow = Way("shm", *[wanted - 0.02] * 3)
    with pytest.raises(Unavailable, match=f"less than the {wanted:.3g} GB/s"):
        PoolOpener({"shm": opens(slow)}, least=least).open(offer, READER, nothing)
    assert slow.closed


def test_a_slow_pair_is_an_error_unless_that_is_allowed() -> None:
    slow = Way("shm", 0.1, 0.15, 0.12)
    with pytest.raises(Unavailable, match=r"shm gives 0\.15 GB/s, less than the 0\.2 GB/s.*allow_slow_transport"):
        PoolOpener({"shm": opens(slow)}, least={"shm": 0.2}).open(LARGE, READER, nothing)
    assert slow.closed
    again = Way("shm", 0.1, 0.15, 0.12)
    opener = PoolOpener({"shm": opens(again)}, least={"shm": 0.2}, allow_slow=True)
    assert opener.open(LARGE, READER, nothing) == Opened(again, 0.15)
    assert not again.closed


def test_one_good_probe_is_enough() -> None:
    way = Way("shm", 0.1, 5.0)
    opened = PoolOpener({"shm": opens(way)}, least={"shm": 0.2}).open(LARGE, READER, nothing)
    assert isinstance(opened, Opened)
    assert opened.gb_per_s == 5.0


def test_a_probe_that_fails_closes_the_pool() -> None:
    way = Way("shm")
    with pytest.raises(IndexError):
        PoolOpener({"shm": opens(way)}).open(OFFER, READER, nothing)
    assert way.closed
