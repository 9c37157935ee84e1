"""Decode workers' pools in the memory of GPUs of this host, as a prefill worker opens them."""

from typing import TYPE_CHECKING

from ...kvtransfer.cuda_ipc import CudaIpcTransport
from ...kvtransfer.cuda_pool import PeerCudaPool
from ...kvtransfer.transport import Transport
from .pool_opener import Broken, Open
from .wire_link import PoolOffer

if TYPE_CHECKING:
    from ...kvtransfer.cuda_source import CudaSource


def cuda_opener(source: "CudaSource") -> Open:
    """Opens pools for pages of `source` to be written into."""

    def open_pool(offer: PoolOffer, incarnation: int, _: Broken) -> Transport:
        nbytes = source.layers * offer.pages * source.page_bytes
        pool = PeerCudaPool.open(offer.descriptor, device=source.device, incarnation=incarnation, nbytes=nbytes)
        try:
            return CudaIpcTransport(source, pool, offer.pages)
        except BaseException:
            pool.close()
            raise

    return open_pool
