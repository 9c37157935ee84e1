"""What the device knows of each sequence: its block table and the token drawn last. A slot is a row of both."""

from collections import OrderedDict
from dataclasses import dataclass

import torch

from ..batch import Row
from ..request import SequenceKey

PADDING = 0  # the slot of rows that are none: its table names the sink only


@dataclass(slots=True)
class _Place:
    """What was told to the device of a sequence."""

    slot: int
    pages: list[int]  # the block table as the engine keeps it: the same list while the sequence stays
    told: int = 0  # leading pages that the device knows


class DeviceState:
    """Block tables and last tokens on the device, and who has which slot.

    Sequences are given slots when first seen, those least recently used first: twice as many as run at once, so that
    no step still on its way loses one. A sequence that comes back after that is told anew.
    """

    def __init__(self, rows: int, max_pages: int, device: torch.device) -> None:
        """`rows`: most sequences of a step; `max_pages`: of the longest sequence."""
        self.slots = 2 * rows + 1
        self.tables = torch.zeros(self.slots, max_pages, dtype=torch.int32, device=device)
        self.last_tokens = torch.zeros(self.slots, dtype=torch.int64, device=device)
        self._free = list(range(self.slots - 1, PADDING, -1))
        self._places: OrderedDict[SequenceKey, _Place] = OrderedDict()

    def place(self, row: Row, updates: list[int]) -> int:
        """The row's slot; what the device has to be told first is added to `updates`: slot, index, page of each."""
        place = self._places.get(row.key)
        if place is None:
            slot = self._free.pop() if self._free else self._places.popitem(last=False)[1].slot
            place = self._places[row.key] = _Place(slot, row.pages)
        elif place.pages is not row.pages:  # it lost its pages, or another sequence has its name
            place.pages, place.told = row.pages, 0
        self._places.move_to_end(row.key)
        slot, pages = place.slot, row.pages
        if place.told < len(pages):
            for index in range(place.told, len(pages)):
                updates += (slot, index, pages[index])
            place.told = len(pages)
        return slot

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return self.tables.nbytes + self.last_tokens.nbytes
