"""A ticket on the prefill side: which of its pages were launched, which copies are out."""

from collections.abc import Iterable, Iterator
from enum import Enum, auto

from ..kernels.digest import DIGEST_BYTES, fold_layers
from .messages import Copy, Ticket


class PushState(Enum):
    """Where a ticket stands."""

    WAITING = auto()  # for its request
    PUSHING = auto()  # copies are launched as pages fill
    COMPLETE = auto()  # all seen completed and said so; waits for the reader's word
    STOPPING = auto()  # nothing more is launched; drained when the last copy is seen completed


class Push:
    """One ticket. Launches each page of each layer once, and again only for a resend."""

    def __init__(self, reader: int, ticket: Ticket, layers: int, page_size: int, deadline: float) -> None:
        """`deadline`: when the ticket expires, in the writer's monotonic seconds."""
        self.reader = reader
        self.ticket = ticket
        self.deadline = deadline
        self.state = PushState.WAITING
        self.reason = ""  # of stopping
        self.round = 0
        self.repeat_at = 0.0  # of `Complete`
        self.digests = bytearray(layers * len(ticket.pages) * DIGEST_BYTES)
        self.outstanding: dict[int, Copy] = {}  # by copy
        self._first_page = ticket.first_position // page_size
        self._folded = b""  # not made up
        self._launched = [0] * layers  # leading ordinals, by layer
        self._reported = (0, 0)  # the last progress told

    def due(self, layer: int, whole_pages: int) -> range:
        """Ordinals of this layer that may be launched now, given the prompt's leading pages that are written."""
        start = self._launched[layer]
        return range(start, max(start, min(whole_pages - self._first_page, len(self.ticket.pages))))

    def launch(self, copy: int, layer: int, ordinals: range, prompt_pages: tuple[int, ...]) -> Copy:
        """The instruction that copies these ordinals, noted as outstanding."""
        source = slice(self._first_page + ordinals.start, self._first_page + ordinals.stop)
        target = self.ticket.pages[ordinals.start : ordinals.stop]
        instruction = Copy(
            copy, self.reader, self.ticket.ticket, layer, ordinals.start, src=prompt_pages[source], dst=target
        )
        self._launched[layer] = max(self._launched[layer], ordinals.stop)
        self.outstanding[copy] = instruction
        return instruction

    def landed(self, copy: int, digests: bytes) -> None:
        """The host saw this copy completed. Raises ValueError when the digests are not one for each page."""
        done = self.outstanding[copy]
        if len(digests) != len(done.dst) * DIGEST_BYTES:
            raise ValueError(f"{len(digests)} bytes of digests for {len(done.dst)} pages")
        del self.outstanding[copy]
        start = (done.layer * len(self.ticket.pages) + done.ordinal) * DIGEST_BYTES
        self.digests[start : start + len(digests)] = digests
        self._folded = b"" if self.outstanding or not self.all_launched() else self._fold()

    def folded(self) -> bytes:
        """What `Complete` tells: a digest a page. Made up when the last copy landed: later a client waits."""
        return self._folded or self._fold()

    def _fold(self) -> bytes:
        return fold_layers(bytes(self.digests), len(self.ticket.pages))

    def any_launched(self) -> bool:
        """Whether a copy was ever launched."""
        return any(self._launched)

    def all_launched(self) -> bool:
        """Whether every page of every layer was launched."""
        return all(launched == len(self.ticket.pages) for launched in self._launched)

    def news(self) -> list[tuple[int, int, int]]:
        """The progress entry of this ticket, if it changed since the last call."""
        now = self.progress()
        if self.state is not PushState.PUSHING or self.round or now == self._reported:
            return []
        self._reported = now
        return [(self.ticket.ticket, *now)]

    def progress(self) -> tuple[int, int]:
        """(leading layers, leading pages) that are written, as the host saw."""
        landed = list(self._launched)
        for copy in self.outstanding.values():
            landed[copy.layer] = min(landed[copy.layer], copy.ordinal)
        pages = landed[0] if landed else 0
        behind = (layer for layer, count in enumerate(landed) if count < pages)
        return (next(behind, len(landed)), pages) if pages else (0, 0)


def runs(ordinals: Iterable[int]) -> Iterator[range]:
    """Contiguous stretches of `ordinals`, in rising order."""
    start = stop = -1
    for ordinal in sorted(set(ordinals)):
        if ordinal != stop:
            if stop > start:
                yield range(start, stop)
            start = ordinal
        stop = ordinal + 1
    if stop > start:
        yield range(start, stop)
