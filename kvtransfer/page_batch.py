"""A stretch of pages as one batch of copies: what is known of it is made once a step and serves all of its layers."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

from .messages import Copy
from .transport import check_copy

_REMEMBERED = 64  # batches: tickets whose chunks alternate in one step, and some more

Offsets = npt.NDArray[np.uint64]


class PageBatch:
    """Where the pages of a copy lie within a layer of either pool, neighbours on both sides merged."""

    def __init__(self, src: Sequence[int], dst: Sequence[int], page_bytes: int) -> None:
        """Pages src[i] of one's own pool onto dst[i] of the peer's; as many of either."""
        sources, targets, counts = merge(src, dst)
        self.src, self.dst = tuple(src), tuple(dst)
        self.sources: Offsets = sources * np.uint64(page_bytes)  # bytes from the layer's beginning
        self.targets: Offsets = targets * np.uint64(page_bytes)
        self.sizes: Offsets = counts * np.uint64(page_bytes)
        self.ids: Tensor | None = None  # int32 [pages], `src` on the device; made by whoever needs it

    def __len__(self) -> int:
        return len(self.sizes)


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


@dataclass(frozen=True, slots=True)
class LayersAt:
    """Layers that follow each other in a pool."""

    address: int  # of the first
    stride: int  # bytes from one to the next

    def pointers(self, layers: int) -> Offsets:
        """Where each begins: uint64 [layers, 1]."""
        starts = np.arange(layers, dtype=np.uint64) * np.uint64(self.stride) + np.uint64(self.address)
        return starts[:, None]


class Addresses:
    """The pointers of a launch, written over the last one's: a launched batch has read them."""

    def __init__(self) -> None:
        """Empty."""
        self._all = np.zeros((3, 0), np.uint64)
        self._places = (0, 0, 0)

    def of(self, batch: PageBatch, layers: int, source: LayersAt, target: LayersAt) -> tuple[int, int, int]:
        """Addresses of the arrays of targets, sources and sizes: the batch in so many layers, one after the other."""
        shape = (layers, len(batch))
        count = layers * len(batch)
        if count > self._all.shape[1]:
            self._all = np.zeros((3, 2 * count), np.uint64)
            self._places = (self._all[0].ctypes.data, self._all[1].ctypes.data, self._all[2].ctypes.data)
        np.add(batch.targets, target.pointers(layers), out=self._all[0, :count].reshape(shape))
        np.add(batch.sources, source.pointers(layers), out=self._all[1, :count].reshape(shape))
        self._all[2, :count].reshape(shape)[:] = batch.sizes
        return self._places


def merge(src: Sequence[int], dst: Sequence[int]) -> tuple[Offsets, Offsets, Offsets]:
    """First pages, src and dst, and the lengths of the stretches that are contiguous on both sides."""
    sources, targets = np.array(src, np.int64), np.array(dst, np.int64)
    begins = np.ones(len(sources), np.bool_)
    begins[1:] = (np.diff(sources) != 1) | (np.diff(targets) != 1)
    at = np.flatnonzero(begins)
    counts = np.diff(np.append(at, len(sources)))
    return sources[at].astype(np.uint64), targets[at].astype(np.uint64), counts.astype(np.uint64)
