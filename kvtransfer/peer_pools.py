"""Decode workers' pools, as the prefill side writes into them."""

import logging

from torch import Tensor

from ..kernels.digest import DIGEST_BYTES, page_digests
from .messages import Copy
from .pool_pages import pool_bytes
from .transport import Transport

log = logging.getLogger(__name__)


class PeerPools:
    """One transport a reader. On the engine's thread."""

    def __init__(
        self,
        pool: Tensor,  # [layers, pages, 2, kv_heads, page_size, head_dim]
    ) -> None:
        """`pool`: our own, from which pages are pushed."""
        self._bytes = pool_bytes(pool)
        self._transports: dict[int, Transport] = {}

    def add(self, reader: int, transport: Transport) -> None:
        """That reader's pool is open."""
        self._transports[reader] = transport

    def drop(self, reader: int) -> None:
        """Lets go of a dead reader's pool."""
        if (transport := self._transports.pop(reader, None)) is not None:
            transport.close()
            log.info("closed the pool of %016x", reader)

    def close(self) -> None:
        """Lets go of all."""
        for transport in self._transports.values():
            transport.close()
        self._transports.clear()

    def push(self, copy: Copy) -> bytes:
        """Copies, and returns the digests of the source pages.

        A failure becomes digests that match nothing: the reader asks anew, or gives up.
        """
        try:
            self._transports[copy.reader].copy(copy.layer, copy.src, copy.dst)
            return page_digests(
                self._bytes[copy.layer], copy.src, ticket=copy.ticket, layer=copy.layer, ordinal=copy.ordinal
            )
        except Exception:
            log.exception("a copy into the pool of %016x failed", copy.reader)
            return bytes(DIGEST_BYTES * len(copy.src))
