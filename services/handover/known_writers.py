"""What a decode worker knows of prefill workers, each one incarnation."""

from collections import OrderedDict

_REMEMBERED = 4096  # incarnations that are gone


class KnownWriters:
    """Where links stand or once stood, and which incarnations are gone for good. On the engine's thread."""

    def __init__(self) -> None:
        """None."""
        self._up: set[int] = set()
        self._met: set[int] = set()
        self._gone: OrderedDict[int, str] = OrderedDict()

    def up(self, writer: int) -> None:
        """A link with it stands."""
        self._met.add(writer)
        self._up.add(writer)

    def down(self, writer: int) -> None:
        """Its link broke."""
        self._up.discard(writer)

    def gone(self, writer: int, reason: str, *, dead: bool) -> None:
        """It will deliver nothing any more; `dead`: for certain, so that it holds no ticket either."""
        self._up.discard(writer)
        if dead:
            self._met.discard(writer)
        self._gone[writer] = reason
        if len(self._gone) > _REMEMBERED:
            self._gone.popitem(last=False)

    def linked(self, writer: int) -> bool:
        """Whether a link with it stands."""
        return writer in self._up

    def met(self, writer: int) -> bool:
        """Whether a link with it stood once: it may hold tickets, and its death becomes known where it can be."""
        return writer in self._met

    def why_gone(self, writer: int) -> str | None:
        """Why it delivers nothing; None while it may."""
        return self._gone.get(writer)
