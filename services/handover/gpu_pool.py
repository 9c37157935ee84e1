"""KV between workers whose pools are in GPUs' memory."""

import logging
from typing import TYPE_CHECKING

from ...errors import Mismatch
from ...kvtransfer.cuda_ipc import CudaIpcTransport
from ...kvtransfer.cuda_pool import PeerCudaPool
from ...kvtransfer.transport import Transport
from .link_server import OpenTransport
from .wire_link import PoolOffer

if TYPE_CHECKING:
    from ...kvtransfer.cuda_source import CudaSource

log = logging.getLogger(__name__)


def cuda_opener(source: "CudaSource") -> OpenTransport:
    """Opens decode workers' pools for pages of `source` to be written into, and measures how fast that goes."""

    def open_pool(offer: PoolOffer, incarnation: int) -> Transport:
        if offer.transport != CudaIpcTransport.kind:
            raise Mismatch(f"transports: {CudaIpcTransport.kind} here, {offer.transport} there")
        nbytes = source.layers * offer.pages * source.page_bytes
        pool = PeerCudaPool.open(offer.descriptor, device=source.device, incarnation=incarnation, nbytes=nbytes)
        try:
            transport = CudaIpcTransport(source, pool, offer.pages)
            speed = transport.probe()
        except BaseException:
            pool.close()
            raise
        log.info("pool of %016x: %d pages by cuda_ipc, %.1f GB/s", incarnation, offer.pages, speed)
        return transport

    return open_pool
