"""Host memory that a GPU writes digests into, and the event by which the host knows that they are there."""

import logging
from collections import defaultdict, deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..kernels.digest import DIGEST_BYTES

log = logging.getLogger(__name__)

_LEAST = 64  # digests


class DigestSlot:
    """Room for some digests; in use from `take` to `give`."""

    def __init__(self, capacity: int) -> None:
        """`capacity`: digests."""
        self.words = torch.zeros(capacity, dtype=torch.int64, pin_memory=True)
        self.event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]

    def view(self, layers: int, pages: int) -> Tensor:  # int64 [layers, pages]
        """Its beginning, for a kernel to write; the device reaches pinned memory by the same address."""
        return self.words[: layers * pages].view(layers, pages)

    def digests(self, count: int) -> bytes:
        """The first `count`, once the event has happened."""
        return self.words[:count].numpy().tobytes()


class DigestSlots:
    """As many slots as were ever in use at once. Taken on one thread, given back on another."""

    def __init__(self) -> None:
        """None is made."""
        self._free: defaultdict[int, deque[DigestSlot]] = defaultdict(deque)  # by capacity

    def take(self, count: int) -> DigestSlot:
        """One with room for `count` digests."""
        capacity = max(_LEAST, 1 << (count - 1).bit_length())
        try:
            return self._free[capacity].popleft()
        except IndexError:
            return DigestSlot(capacity)

    def give(self, slot: DigestSlot) -> None:
        """Nobody writes or reads it any more."""
        self._free[len(slot.words)].append(slot)

    def seen(
        self, slot: DigestSlot, count: int, landed: Callable[[bytes], None], what: str
    ) -> Callable[[Exception | None], None]:
        """For whoever waits for the slot's event: gives the slot back and tells `landed` of its first `count` digests.

        After an error nothing runs on the device any more: `what` failed, the digests match nothing, the slot is lost.
        """

        def tell(error: Exception | None) -> None:
            if error is not None:
                log.error("%s failed: %s", what, error)
                landed(no_digests(count))
                return
            digests = slot.digests(count)
            self.give(slot)
            landed(digests)

        return tell


def page_ids(pages: Sequence[int], stream: torch.cuda.Stream) -> Tensor:  # int32 [pages]
    """On the stream's device, as of that stream; from pinned memory, or the host would wait."""
    with torch.cuda.stream(stream):
        return torch.tensor(pages, dtype=torch.int32).pin_memory().to(stream.device, non_blocking=True)


def use_device(device: torch.device) -> None:
    """Makes it the thread's current one, as launches on a stream of one's choice need it: less than choosing the stream
    for a stretch of code takes.
    """
    if torch.cuda.current_device() != device.index:
        torch.cuda.set_device(device)


def no_digests(count: int) -> bytes:
    """Digests that match nothing."""
    return bytes(DIGEST_BYTES * count)
