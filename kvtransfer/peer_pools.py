"""Decode workers' pools, as the prefill side writes into them."""

import logging

from ..kernels.digest import DIGEST_BYTES
from .messages import Copy
from .transport import Done, Transport

log = logging.getLogger(__name__)


class PeerPools:
    """One transport a reader. On the engine's thread."""

    def __init__(self) -> None:
        """None is open."""
        self._transports: dict[int, Transport] = {}

    def add(self, reader: int, transport: Transport) -> None:
        """That reader's pool is open. Another transport than before: it has taken the older one's access back."""
        old, self._transports[reader] = self._transports.get(reader), transport
        if old is not None and old is not transport:
            old.peer_gone()
            old.close()

    def gone(self, reader: int) -> None:
        """That reader is dead: copies into its pool end soon."""
        if (transport := self._transports.get(reader)) is not None:
            transport.peer_gone()

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

    def push(self, copy: Copy, done: Done) -> None:
        """Starts the copy; `done` comes as `Transport.start` says.

        A failure becomes digests that match nothing: the reader asks anew, or gives up.
        """
        try:
            self._transports[copy.reader].start(copy, done)
        except Exception:
            log.exception("a copy into the pool of %016x failed", copy.reader)
            done(copy.copy, bytes(DIGEST_BYTES * len(copy.src)))
