"""Decode workers' pools in ordinary memory of this host, or of any, as a prefill worker opens them."""

import threading

from torch import Tensor

from ...kvtransfer.layer_marks import LayerMarks
from ...kvtransfer.nixl import NixlTransport
from ...kvtransfer.nixl_source import NixlSource
from ...kvtransfer.pool_pages import pool_bytes
from ...kvtransfer.shm import SharedPool
from ...kvtransfer.transport import ShmTransport, Transport
from .pool_opener import Broken, Open
from .wire_link import PoolOffer


def shm_opener(
    pool: Tensor,  # [layers, pages, 2, kv_heads, page_size, head_dim]
) -> Open:
    """Opens pools that are mapped files, for pages of ours to be written into."""
    source = pool_bytes(pool)
    layers, _, page_bytes = source.shape

    def open_pool(offer: PoolOffer, incarnation: int, _: Broken) -> Transport:
        nbytes = layers * offer.pages * page_bytes
        shared = SharedPool.open(offer.descriptor, incarnation=incarnation, nbytes=nbytes)
        try:
            return ShmTransport(source, shared, offer.pages)
        except BaseException:
            shared.close()
            raise

    return open_pool


class NixlOpener:
    """Opens pools by NIXL, which is set up when the first one is to be opened."""

    def __init__(
        self,
        pool: Tensor,  # [layers, pages, 2, kv_heads, page_size, head_dim]
        incarnation: int,
        marks: LayerMarks | None = None,
    ) -> None:
        """`pool`: ours, from which pages are pushed. `incarnation`: ours. `marks`: of an engine on a GPU."""
        self._marks = marks
        self._pages = pool_bytes(pool)
        self._incarnation = incarnation
        self._source: NixlSource | None = None
        self._lock = threading.Lock()

    def __call__(self, offer: PoolOffer, incarnation: int, broken: Broken) -> Transport:
        """See `Open`."""
        with self._lock:
            if self._source is None:
                self._source = NixlSource(self._pages, self._incarnation, self._marks)
        return NixlTransport(self._source, offer.descriptor, incarnation=incarnation, pages=offer.pages, broken=broken)

    def close(self) -> None:
        """Once all that it opened is closed."""
        with self._lock:
            if self._source is not None:
                self._source.close()
                self._source = None
