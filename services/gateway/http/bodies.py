"""Reads requests' bodies, bounded each and all together."""

from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

from ..arrivals import Arrivals
from ..callers import caller_of
from .errors import ClientGone, HttpRefusal

Message: TypeAlias = Any  # ASGI's own mappings
Receive: TypeAlias = Callable[[], Awaitable[Message]]


class Bodies:
    """Of all connections."""

    def __init__(self, most: int, arrivals: Arrivals) -> None:
        """`most`: bytes of one."""
        self._most = most
        self._arrivals = arrivals

    async def read(self, receive: Receive, length: str, peer: str) -> bytes:
        """A body. `length`: what its header says, perhaps nothing; `peer`: the client's address. HttpRefusal where it
        is too long; Overloaded where it comes too slowly; ClientGone."""
        if length.isdecimal() and int(length[:20]) > self._most:
            raise self._too_long()
        first, more = await _part(receive)  # as much as a connection buffers
        if not more and len(first) <= self._most:
            return first
        async with self._arrivals.place(caller_of(peer)):
            parts, size = [first], len(first)
            while more and size <= self._most:
                part, more = await _part(receive)
                parts.append(part)
                size += len(part)
        if size > self._most:
            raise self._too_long()
        return b"".join(parts)

    def _too_long(self) -> HttpRefusal:
        return HttpRefusal(
            f"the body exceeds {self._most} bytes (max_message_bytes)", status=413, code="request_too_large"
        )


async def _part(receive: Receive) -> tuple[bytes, bool]:
    """What is there, and whether more follows."""
    message = await receive()
    if message["type"] == "http.disconnect":
        raise ClientGone("the client left")
    return message.get("body", b""), message.get("more_body", False)
