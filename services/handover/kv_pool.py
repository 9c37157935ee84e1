"""Opens decode workers' pools for a prefill worker."""

import logging

from torch import Tensor

from ...errors import Mismatch
from ...kvtransfer.pool_pages import pool_bytes
from ...kvtransfer.shm import SharedPool
from ...kvtransfer.transport import ShmTransport, Transport
from .link_server import OpenTransport
from .wire_link import PoolOffer

log = logging.getLogger(__name__)


def shm_opener(
    pool: Tensor,  # [layers, pages, 2, kv_heads, page_size, head_dim]
) -> OpenTransport:
    """Opens decode workers' pools for pages of ours to be written into, and measures how fast that goes."""
    source = pool_bytes(pool)
    layers, _, page_bytes = source.shape

    def open_pool(offer: PoolOffer, incarnation: int) -> Transport:
        if offer.transport != ShmTransport.kind:
            raise Mismatch(f"transports: {ShmTransport.kind} here, {offer.transport} there")
        nbytes = layers * offer.pages * page_bytes
        shared = SharedPool.open(offer.descriptor, incarnation=incarnation, nbytes=nbytes)
        try:
            transport = ShmTransport(source, shared, offer.pages)
        except BaseException:
            shared.close()
            raise
        log.info("pool of %016x: %d pages by shm, %.1f GB/s", incarnation, offer.pages, transport.probe())
        return transport

    return open_pool
