"""A prefill worker's pool on a GPU, as copies leave it: a stream beside the engine's, and what it waits for."""

import logging
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from ..kernels.gpu.page_digest import digest_pages
from .cuda_runtime import BatchCopy
from .digest_slots import DigestSlots, page_ids, use_device
from .event_waiter import EventWaiter
from .layer_marks import LayerMarks
from .messages import Copy
from .page_batch import LayersAt, PageBatch

log = logging.getLogger(__name__)

Landed: TypeAlias = Callable[[bytes], None]
"""The digests of copies' source pages, layer by layer: the host has seen them completed. On the waiter's thread."""

_MEASURED = 4  # batches
_HIGH_PRIORITY = -1  # digests of the last layer must not queue up behind what the engine launched after it


class CudaSource:
    """One's own pool. Made and used on threads of one process; copies are launched on the engine's thread.

    The engine's hook tells when a layer's write is launched (`written`); what reads that layer waits for it on the
    device. So a copy can be launched at any time after, in the step or behind it, and delays nothing.
    """

    def __init__(
        self,
        pages: Tensor,  # [layers, pages, page_bytes] uint8, on a CUDA device, contiguous
    ) -> None:
        """Compiles what pushing needs. ConfigError (device) where cuda-bindings or the driver does not do."""
        self.layers, self.pages, self.page_bytes = pages.shape
        self.device = pages.device
        self.address = pages.data_ptr()
        self._copy = BatchCopy()
        with torch.cuda.device(self.device):
            self.stream = torch.cuda.Stream(self.device, priority=_HIGH_PRIORITY)  # type: ignore[no-untyped-call]
        self.marks = LayerMarks(self.layers, self.device)
        words = pages.view(torch.int64)
        self._words = words  # int64 [layers, pages, words]
        self._slots = DigestSlots()
        self._waiter = EventWaiter("kv-copies", lambda: torch.cuda.set_device(self.device))
        self._warm_up()

    @property
    def layer_bytes(self) -> int:
        """Of all pages of a layer."""
        return self.pages * self.page_bytes

    def written(self, layer: int) -> None:
        """All that a step writes up to that layer is launched on the current stream; see `LayerMarks.written`."""
        self.marks.written(layer)

    def push(self, copies: Sequence[Copy], batch: PageBatch, target: LayersAt, landed: Landed) -> None:
        """Launches checked copies of the same pages in layers that follow each other, and the digests of their sources.

        `target`: those layers of the peer's pool. Raises, with nothing under way, where that fails.
        """
        first, layers, pages = copies[0], len(copies), len(batch.src)
        if not pages:
            landed(b"")
            return
        use_device(self.device)
        slot = self._slots.take(layers * pages)
        source = LayersAt(self.address + first.layer * self.layer_bytes, self.pages)
        boxes = batch.place(layers, source, target)
        if batch.ids is None:
            batch.ids = page_ids(batch.src, self.stream)
        self.stream.wait_event(self.marks.of(copies[-1].layer))
        try:
            self._copy(boxes, len(batch), self.stream.cuda_stream)
            digest_pages(
                self._words[first.layer : first.layer + layers],
                batch.ids,
                slot.view(layers, pages),
                ticket=first.ticket,
                first_layer=first.layer,
                ordinal=first.ordinal,
                stream=self.stream,
            )
            slot.event.record(self.stream)
        except BaseException:
            self.stream.synchronize()  # who is told of a failure takes it that nothing is written any more
            raise

        self._waiter.add(slot.event, self._slots.seen(slot, layers * pages, landed, "a copy"))

    def measure(self, batch: PageBatch, layers: int, target: LayersAt) -> float:
        """GB/s of these pages in the first layers, onto `target`; launched some times behind a first one, for a launch
        alone takes the host about as long as a small batch takes the device.
        """
        boxes = batch.place(layers, LayersAt(self.address, self.pages), target)
        with torch.cuda.stream(self.stream):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            for number in range(1 + _MEASURED):
                if number == 1:
                    begin.record()
                self._copy(boxes, len(batch), self.stream.cuda_stream)
            end.record()
            end.synchronize()
            seconds = max(float(begin.elapsed_time(end)) / 1e3, 1e-9)
            return _MEASURED * layers * len(batch.src) * self.page_bytes / seconds / 1e9

    def synchronize(self) -> None:
        """Waits for all launched copies; raises when the device failed."""
        self.stream.synchronize()

    def close(self) -> None:
        """Ends the waiter's thread, once it has seen all copies completed."""
        self._waiter.close()

    def _warm_up(self) -> None:
        """Page 0 of layer 0, so that the first push compiles nothing."""
        with torch.cuda.device(self.device):
            slot = self._slots.take(1)
            ids = page_ids((0,), self.stream)
            digest_pages(self._words[:1], ids, slot.view(1, 1), ticket=1, first_layer=0, ordinal=0, stream=self.stream)
            self.stream.synchronize()
        self._slots.give(slot)
