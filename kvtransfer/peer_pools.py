"""Decode workers' pools, as the prefill side writes into them."""

import logging
from collections.abc import Callable, Sequence
from typing import TypeAlias

from .digest_slots import no_digests
from .messages import Copy
from .transport import LayersTransport, Transport

log = logging.getLogger(__name__)

Landed: TypeAlias = Callable[[Sequence[Copy], bytes], None]
"""The digests of these copies' source pages, layer by layer: the host has seen them completed. Any thread."""


class PeerPools:
    """One transport a reader. On the engine's thread."""

    def __init__(self) -> None:
        """None is open."""
        self._transports: dict[int, Transport] = {}
        self._together: dict[int, LayersTransport] = {}  # those of them that are such: to ask it each time takes long

    def add(self, reader: int, transport: Transport) -> None:
        """That reader's pool is open. Another transport than before: it has taken the older one's access back."""
        old, self._transports[reader] = self._transports.get(reader), transport
        self._together.pop(reader, None)
        if isinstance(transport, LayersTransport):
            self._together[reader] = transport
        if old is not None and old is not transport:
            old.peer_gone()
            old.close()

    def gone(self, reader: int) -> None:
        """That reader is dead: copies into its pool end soon."""
        if (transport := self._transports.get(reader)) is not None:
            transport.peer_gone()

    def drop(self, reader: int) -> None:
        """Lets go of a dead reader's pool."""
        self._together.pop(reader, None)
        if (transport := self._transports.pop(reader, None)) is not None:
            transport.close()
            log.info("closed the pool of %016x", reader)

    def close(self) -> None:
        """Lets go of all."""
        for transport in self._transports.values():
            transport.close()
        self._transports.clear()
        self._together.clear()

    def push(self, copies: Sequence[Copy], landed: Landed) -> None:
        """Starts copies of the same pages in layers that follow each other. `landed` comes for all at once, or for one
        after the other; each time as `Transport.start` says of `done`.

        A failure becomes digests that match nothing: the reader asks anew, or gives up.
        """
        reader = copies[0].reader
        if (together := self._together.get(reader)) is not None:
            _start(together, copies, landed)
            return
        for copy in copies:
            _start_one(self._transports.get(reader), copy, landed)


def _start(transport: LayersTransport, copies: Sequence[Copy], landed: Landed) -> None:
    try:
        transport.start_layers(copies, lambda digests: landed(copies, digests))
    except Exception:
        _fail(copies, landed)


def _start_one(transport: Transport | None, copy: Copy, landed: Landed) -> None:
    try:
        if transport is None:
            raise KeyError(f"the pool of {copy.reader:016x} is not open")
        transport.start(copy, lambda _, digests: landed((copy,), digests))
    except Exception:
        _fail((copy,), landed)


def _fail(copies: Sequence[Copy], landed: Landed) -> None:
    log.exception("a copy into the pool of %016x failed", copies[0].reader)
    landed(copies, no_digests(sum(len(copy.src) for copy in copies)))
