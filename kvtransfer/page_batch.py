"""A stretch of pages as one batch of copies: what is known of it is made once a step and serves all of its layers."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

from .cuda_runtime import copy_boxes
from .messages import Copy
from .transport import check_copy

_REMEMBERED = 64  # batches: tickets whose chunks alternate in one step, and some more

Numbers = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class LayersAt:
    """Layers that follow each other in a pool."""

    address: int  # of the first
    pages: int  # from one to the next


class PageBatch:
    """The copies of pages within layers of either pool, neighbours on both sides merged."""

    def __init__(self, src: Sequence[int], dst: Sequence[int], page_bytes: int) -> None:
        """Pages src[i] of one's own pool onto dst[i] of the peer's; as many of either."""
        sources, targets, counts = merge(src, dst)
        self.src, self.dst = tuple(src), tuple(dst)
        self.ids: Tensor | None = None  # int32 [pages], `src` on the device; made by whoever needs it
        self._sources = sources * np.uint64(page_bytes)  # bytes from the layer's beginning
        self._targets = targets * np.uint64(page_bytes)
        self._boxes = copy_boxes(len(counts))
        for name in ("source_row_bytes", "target_row_bytes", "width"):
            self._boxes[name] = page_bytes
        self._boxes["rows"] = counts
        self._address: int = self._boxes.ctypes.data

    def __len__(self) -> int:
        return len(self._boxes)

    def place(self, layers: int, source: LayersAt, target: LayersAt) -> int:
        """Address of the boxes that copy these pages in so many layers: until the next call, for a launched batch has
        read them.
        """
        boxes = self._boxes
        np.add(self._sources, np.uint64(source.address), out=boxes["source_address"])
        np.add(self._targets, np.uint64(target.address), out=boxes["target_address"])
        boxes["source_layer_rows"], boxes["target_layer_rows"] = source.pages, target.pages
        boxes["layers"] = layers
        return self._address


class PageBatches:
    """The batches of late, one for each stretch of a ticket's pages: the copies of a step differ in the layer only."""

    def __init__(self, layers: int, source_pages: int, target_pages: int, page_bytes: int) -> None:
        """`source_pages`, `target_pages`: of either pool, page 0 counted in."""
        self._layers = layers
        self._pages = (source_pages, target_pages)
        self._page_bytes = page_bytes
        self._made: OrderedDict[tuple[int, int], PageBatch] = OrderedDict()

    def of(self, copy: Copy) -> PageBatch:
        """ValueError for a layer or a page out of range, the peer's page 0 included, or unequal counts."""
        name = (copy.ticket, copy.ordinal)
        batch = self._made.get(name)
        if batch is not None and batch.src == copy.src and batch.dst == copy.dst and 0 <= copy.layer < self._layers:
            return batch
        check_copy(copy, layers=self._layers, src_pages=self._pages[0], dst_pages=self._pages[1])
        batch = self._made[name] = PageBatch(copy.src, copy.dst, self._page_bytes)
        self._made.move_to_end(name)
        if len(self._made) > _REMEMBERED:
            self._made.popitem(last=False)
        return batch


def merge(src: Sequence[int], dst: Sequence[int]) -> tuple[Numbers, Numbers, Numbers]:
    """First pages, src and dst, and the lengths of the stretches that are contiguous on both sides."""
    sources, targets = np.array(src, np.int64), np.array(dst, np.int64)
    begins = np.ones(len(sources), np.bool_)
    begins[1:] = (np.diff(sources) != 1) | (np.diff(targets) != 1)
    at = np.flatnonzero(begins)
    counts = np.diff(np.append(at, len(sources)))
    return sources[at].astype(np.uint64), targets[at].astype(np.uint64), counts.astype(np.uint64)
