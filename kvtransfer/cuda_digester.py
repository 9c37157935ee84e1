"""Digests of a decode worker's own pages, by its GPU, beside what the engine computes there."""

import logging
from collections import OrderedDict

import torch
from torch import Tensor

from ..kernels.gpu.page_digest import digest_pages
from .digest_slots import DigestSlots, no_digests, page_ids, use_device
from .event_waiter import EventWaiter
from .messages import Verify
from .pool_pages import Digested

log = logging.getLogger(__name__)

_HIGH_PRIORITY = -1  # a prompt waits for its last digests, a decode step for nothing of theirs
_REMEMBERED = 64  # page lists: of tickets whose layers come one after the other


class CudaDigester:
    """Implements `Digester`: launches a kernel and goes on; a thread of its own sees the digests come."""

    def __init__(
        self,
        pages: Tensor,  # [layers, pages, page_bytes] uint8, on a CUDA device, contiguous
    ) -> None:
        """Compiles what it needs. `pages`: one's own pool."""
        self._device = pages.device
        self._words = pages.view(torch.int64)
        self._slots = DigestSlots()
        self._sent: OrderedDict[tuple[int, ...], Tensor] = OrderedDict()  # page lists on the device
        with torch.cuda.device(self._device):
            self._stream = torch.cuda.Stream(self._device, priority=_HIGH_PRIORITY)  # type: ignore[no-untyped-call]
            slot = self._slots.take(1)
            self._launch(Verify(writer=0, ticket=1, first_layer=0, layers=1, ordinal=0, pages=(0,)), slot.view(1, 1))
            self._stream.synchronize()
        self._slots.give(slot)
        self._waiter = EventWaiter("kv-digests", lambda: torch.cuda.set_device(self._device))

    def start(self, verify: Verify, digested: Digested) -> None:
        """See `Digester.start`."""
        count = verify.layers * len(verify.pages)
        if not count:
            digested(b"")
            return
        try:
            use_device(self._device)
            slot = self._slots.take(count)
            self._launch(verify, slot.view(verify.layers, len(verify.pages)))
            slot.event.record(self._stream)
        except Exception:  # then the pages count as wrong
            log.exception("digests could not be computed")
            digested(no_digests(count))
            return

        self._waiter.add(slot.event, self._slots.seen(slot, count, digested, "digests"))

    def close(self) -> None:
        """See `Digester.close`."""
        self._waiter.close()

    def _launch(
        self,
        verify: Verify,
        out: Tensor,  # int64 [layers, pages], pinned
    ) -> None:
        digest_pages(
            self._words[verify.first_layer : verify.first_layer + verify.layers],
            self._ids(verify.pages),
            out,
            ticket=verify.ticket,
            first_layer=verify.first_layer,
            ordinal=verify.ordinal,
            stream=self._stream,
        )

    def _ids(self, pages: tuple[int, ...]) -> Tensor:  # int32 [pages]
        """On the device; the layers of a ticket share them."""
        ids = self._sent.get(pages)
        if ids is None:
            ids = self._sent[pages] = page_ids(pages, self._stream)
            if len(self._sent) > _REMEMBERED:
                self._sent.popitem(last=False)
        return ids
