"""What the device knows of each sequence: its block table and the token drawn last. A slot is a row of both."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..batch import Row
from ..request import SequenceKey

PADDING = 0  # the slot of rows that are none: its table names the sink only


@dataclass(slots=True, eq=False)
class Place:
    """What was told to the device of a sequence."""

    key: SequenceKey
    slot: int  # PADDING: it is another's now
    pages: list[int]  # the block table as the engine keeps it: the same list while the sequence stays
    told: int = 0  # leading pages that the device knows
    turn: int = 0  # call in which it was last asked for


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
        self._places: dict[SequenceKey, Place] = {}
        self._turn = 0

    def place(self, row: Row, updates: list[int]) -> int:
        """The row's slot; what the device has to be told first is added to `updates`: slot, index, page of each."""
        return self.place_all([row], updates, [])[0]

    def place_all(self, rows: Sequence[Row], updates: list[int], fresh: list[Row]) -> list[int]:
        """As `place`, of a step's rows. `fresh`: gets those that were not met before.

        A row keeps its place in its `note`: most rows of a step are those of the step before.
        """
        self._turn += 1
        turn, slots = self._turn, list[int]()
        for row in rows:
            place: Place | None = row.note
            if place is None or place.slot == PADDING:
                place = row.note = self._find(row.key, row.pages)
                fresh.append(row)
            pages = row.pages
            if place.pages is not pages or place.told < len(pages):
                _tell(place, pages, updates)
            place.turn = turn
            slots.append(place.slot)
        return slots

    def _find(self, key: SequenceKey, pages: list[int]) -> Place:
        place = self._places.get(key)
        if place is None:
            place = self._places[key] = Place(key, self._take_slot(), pages)
        return place

    def _take_slot(self) -> int:
        if self._free:
            return self._free.pop()
        oldest = min(self._places.values(), key=lambda place: place.turn)
        del self._places[oldest.key]
        slot, oldest.slot = oldest.slot, PADDING
        return slot

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return self.tables.nbytes + self.last_tokens.nbytes


def _tell(place: Place, pages: list[int], updates: list[int]) -> None:
    if place.pages is not pages:  # it lost its pages, or another sequence has its name
        place.pages, place.told = pages, 0
    for index in range(place.told, len(pages)):
        updates += (place.slot, index, pages[index])
    place.told = len(pages)
