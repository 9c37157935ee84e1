"""What a prefix cache gained and lost since somebody last asked."""

from dataclasses import dataclass

LIMIT = 1 << 16  # digests kept for whoever asks; nobody may ever do


@dataclass(frozen=True, slots=True)
class Changes:
    """`reset`: everything told before is void, and `stored` is all that there is."""

    reset: bool
    stored: list[bytes]
    evicted: list[bytes]


class CacheChanges:
    """Net changes: what came and went in between is not told. On the engine's thread."""

    def __init__(self, limit: int = LIMIT) -> None:
        """`limit`: beyond so many digests the changes are given up; whoever asks is told all that there is instead."""
        self._limit = limit
        self._stored: dict[bytes, None] = {}
        self._evicted: dict[bytes, None] = {}
        self._overflowed = False

    def stored(self, digest: bytes) -> None:
        """A page of this content can be found."""
        if digest in self._evicted:
            del self._evicted[digest]
        else:
            self._note(self._stored, digest)

    def evicted(self, digest: bytes) -> None:
        """It cannot be found any more."""
        if digest in self._stored:
            del self._stored[digest]
        else:
            self._note(self._evicted, digest)

    def take(self) -> Changes | None:
        """Since the last call; None after an overflow."""
        changes = None if self._overflowed else Changes(False, list(self._stored), list(self._evicted))
        self._stored, self._evicted, self._overflowed = {}, {}, False
        return changes

    def _note(self, side: dict[bytes, None], digest: bytes) -> None:
        if self._overflowed:
            return
        side[digest] = None
        if len(self._stored) + len(self._evicted) > self._limit:
            self._stored, self._evicted, self._overflowed = {}, {}, True
