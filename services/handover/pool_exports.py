"""A decode worker's pool as it is opened to one prefill worker after the other."""

import logging
import threading
from collections.abc import Callable
from typing import Protocol

from ...errors import Unavailable

log = logging.getLogger(__name__)

MAX_WRITERS = 256


class Export(Protocol):
    """Access of one writer; see `kvtransfer.nixl_export`."""

    descriptor: bytes

    def close(self) -> None:
        """Ends that writer's access, whatever it does and whatever is in the network."""
        ...


class PoolExports:
    """One export a writer, made when that asks for it. Any thread; blocks for some 100 ms."""

    def __init__(self, kind: str, make: Callable[[], Export]) -> None:
        """`kind`: the transport's name."""
        self.kind = kind
        self._make = make
        self._exports: dict[int, Export] = {}
        self._lock = threading.Lock()
        self._closed = False

    def renew(self, writer: int) -> bytes:
        """The descriptor of a new export; the one that this writer had is closed first. Raises Unavailable."""
        with self._lock:
            self._revoke(writer)
            if self._closed or len(self._exports) >= MAX_WRITERS:
                raise Unavailable("no export of the pool is to be had")
            export = self._exports[writer] = self._make()
            log.info("the pool is open to %016x by %s", writer, self.kind)
            return export.descriptor

    def has(self, writer: int) -> bool:
        """Whether it has access."""
        return writer in self._exports

    def revoke(self, writer: int) -> None:
        """Once this returned, nothing of that writer's reaches the pool any more by an export."""
        with self._lock:
            self._revoke(writer)

    def close(self) -> None:
        """Ends all access; none is given any more."""
        with self._lock:
            self._closed = True
            for writer in tuple(self._exports):
                self._revoke(writer)

    def _revoke(self, writer: int) -> None:
        export = self._exports.get(writer)
        if export is not None:
            export.close()
            del self._exports[writer]
