"""What a worker's role adds to its engine: the hand-over and its links."""

import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from ...errors import TwostrokeError
from ..handover.decode import DecodeHandover
from ..handover.handover import Handover, NoHandover, PeerAddress
from ..handover.kv_pool import shm_opener
from ..handover.link_client import LinkClient
from ..handover.link_server import LinkServer
from ..handover.liveness import Liveness
from ..handover.prefill import PrefillHandover
from ..handover.wire_link import PoolOffer
from ..identity import ProcessIdentity
from ..security.cluster import cluster_dialer
from ..settings import WorkerSettings
from .worker_engine import WorkerEngine


@dataclass(frozen=True, slots=True)
class Role:
    """Built on the event loop, before the `Driver`."""

    handover: Handover
    links: LinkServer | None  # the prefill worker's end of its links
    on_peers: Callable[[list[PeerAddress]], None]
    stop: Callable[[], Awaitable[None]]  # ends the links, once the engine's thread has ended
    close: Callable[[], None]  # lets go of other workers' memory, last of all


def make_role(settings: WorkerSettings, identity: ProcessIdentity, loaded: WorkerEngine) -> Role:
    """The parts of `settings.role` around a loaded engine."""
    match settings.role:
        case "prefill":
            return _prefill(settings, identity, loaded)
        case "decode":
            return _decode(settings, identity, loaded)
        case "both":
            return Role(NoHandover(), None, lambda _: None, _nothing_to_stop, lambda: None)


def _prefill(settings: WorkerSettings, identity: ProcessIdentity, loaded: WorkerEngine) -> Role:
    engine = loaded.engine
    liveness = Liveness(identity.host, silence_s=settings.silence_s)
    links = LinkServer(identity, loaded.form, liveness, shm_opener(engine.pool), page_bytes=engine.plan.page_bytes)
    handover = PrefillHandover(engine.core, links, engine.pool)

    async def stop() -> None:
        links.stop()
        liveness.close()

    return Role(handover, links, lambda _: None, stop, handover.close)


def _decode(settings: WorkerSettings, identity: ProcessIdentity, loaded: WorkerEngine) -> Role:
    engine, shared = loaded.engine, loaded.shared
    if shared is None:
        raise TwostrokeError("a decode worker's pool must be shared")
    offer = PoolOffer(
        pool=secrets.randbits(64) or 1,
        pages=engine.plan.pages,
        page_bytes=engine.plan.page_bytes,
        descriptor=shared.descriptor,
    )
    liveness = Liveness(identity.host, silence_s=settings.silence_s)
    links = LinkClient(identity, loaded.form, liveness, offer, channel=cluster_dialer(settings))
    handover = DecodeHandover(
        engine.core, links, engine.pool, pool_id=offer.pool, ticket_valid_s=settings.ticket_valid_s
    )

    async def stop() -> None:
        await links.stop()
        liveness.close()

    return Role(handover, None, links.want, stop, lambda: None)


async def _nothing_to_stop() -> None:
    """For a role without links."""
