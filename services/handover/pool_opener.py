"""How a prefill worker opens decode workers' pools: the fastest way that works, measured before it is used."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from ...errors import Mismatch, Unavailable
from ...kvtransfer.transport import Transport
from .wire_link import PoolOffer

log = logging.getLogger(__name__)

_PROBES = 3  # a busy machine may spoil one
_PIECE_S = 3e-6  # what a piece may cost besides its bytes: of small pages most of the time

Broken: TypeAlias = Callable[[], None]
"""A transport's connection is lost although both processes live: it needs a new export. Any thread."""

Open: TypeAlias = Callable[[PoolOffer, int, Broken], Transport]
"""Opens the pool of an offer's first way, of this incarnation; any thread. TwostrokeError, OSError, ValueError."""


@dataclass(frozen=True, slots=True)
class Opened:
    """A decode worker's pool, ready to be written."""

    transport: Transport
    gb_per_s: float


def expected(least: float, page_bytes: int) -> float:
    """GB/s of pages of so many bytes over what gives `least` with large ones; 0 for 0."""
    return page_bytes / (page_bytes / least + _PIECE_S * 1e9) if least else 0.0


class PoolOpener:
    """By the ways that this worker has. Any thread; blocks."""

    def __init__(
        self,
        ways: Mapping[str, Open],
        *,
        least: Mapping[str, float] | None = None,
        allow_slow: bool = False,
        close: Callable[[], None] = lambda: None,
    ) -> None:
        """`least`: GB/s by transport, of large pages, of which less is an error unless `allow_slow`. `close`: what the
        ways share.
        """
        self._ways = ways
        self._least = least or {}
        self._allow_slow = allow_slow
        self.close = close

    def open(self, offer: PoolOffer, incarnation: int, broken: Broken) -> Opened | str:
        """By the first way that works, or that way's name where its descriptor has to be made for us first.

        Raises Mismatch that names what either side has and why it does not do; Unavailable where it may later.
        """
        reasons = []
        for way in offer.ways():
            open_pool = self._ways.get(way.transport)
            if open_pool is None:
                continue
            if not way.descriptor:
                return way.transport
            try:
                return self._measured(open_pool(way, incarnation, broken), incarnation, way)
            except (Mismatch, OSError, ValueError) as error:
                reasons.append(f"{way.transport}: {error}")
        here, there = ", ".join(self._ways) or "none", ", ".join(way.transport for way in offer.ways())
        raise Mismatch("; ".join([f"transports: {here} here, {there} there", *reasons]))

    def open_export(self, offer: PoolOffer, incarnation: int, broken: Broken) -> Opened:
        """By the offer's first way, whose descriptor was made for us."""
        open_pool = self._ways.get(offer.transport)
        if open_pool is None or not offer.descriptor:
            raise Mismatch(f"transports: {', '.join(self._ways)} here, {offer.transport} there")
        return self._measured(open_pool(offer, incarnation, broken), incarnation, offer)

    def _measured(self, transport: Transport, incarnation: int, offer: PoolOffer) -> Opened:
        try:
            least, speed = expected(self._least.get(transport.kind, 0.0), offer.page_bytes), 0.0
            for _ in range(_PROBES):
                speed = max(speed, transport.probe())
                if speed >= least:
                    break
            log.info("pool of %016x: %d pages by %s, %.2f GB/s", incarnation, offer.pages, transport.kind, speed)
            if speed < least:
                self._slow(
                    f"{transport.kind} gives {speed:.3g} GB/s, less than the {least:.3g} GB/s that it should "
                    "(transport_gb_per_s; allow_slow_transport takes what there is)"
                )
        except BaseException:
            transport.close()
            raise
        return Opened(transport, speed)

    def _slow(self, text: str) -> None:
        if not self._allow_slow:
            raise Unavailable(text)
        log.warning("%s", text)
