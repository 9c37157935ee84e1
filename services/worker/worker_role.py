"""What a worker's role adds to its engine: the hand-over and its links."""

import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from ...errors import TwostrokeError
from ...kvtransfer.pool_pages import CpuDigester, Digester, pool_bytes
from ..handover.decode import DecodeHandover
from ..handover.handover import Handover, NoHandover, PeerAddress
from ..handover.link_client import LinkClient
from ..handover.link_server import LinkServer
from ..handover.liveness import Liveness
from ..handover.prefill import PrefillHandover
from ..identity import ProcessIdentity
from ..security.cluster import cluster_dialer
from ..settings import WorkerSettings
from .worker_engine import WorkerEngine
from .worker_transports import make_offer, make_opener

if TYPE_CHECKING:
    from ...kvtransfer.cuda_source import CudaSource


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
    source = _source(engine.pool)
    opener = make_opener(settings, identity.incarnation, engine.pool, source)
    written = _nothing_written if source is None else source.written
    links = LinkServer(identity, loaded.form, liveness, opener, page_bytes=engine.plan.page_bytes)
    ends = None if source is None else source.marks.ends
    handover = PrefillHandover(engine.core, links, engine.pool, written=written, ends=ends)

    async def stop() -> None:
        links.stop()
        liveness.close()

    def close() -> None:
        handover.close()
        opener.close()
        if source is not None:
            source.close()

    return Role(handover, links, lambda _: None, stop, close)


def _source(
    pool: Tensor,  # [layers, pages, 2, kv_heads, page_size, head_dim]
) -> "CudaSource | None":
    """The engine's pool as GPU workers push it; None: it is in ordinary memory."""
    if pool.device.type != "cuda":
        return None
    from ...kvtransfer.cuda_source import CudaSource  # Triton is not installed where a CPU serves

    return CudaSource(pool_bytes(pool))


def _digester(
    pool: Tensor,  # [layers, pages, 2, kv_heads, page_size, head_dim]
) -> Digester:
    """What checks the pages of one's own pool."""
    if pool.device.type != "cuda":
        return CpuDigester(pool_bytes(pool))
    from ...kvtransfer.cuda_digester import CudaDigester

    return CudaDigester(pool_bytes(pool))


def _nothing_written(layer: int) -> None:
    """For a runner that has computed a layer when it tells of it."""


def _decode(settings: WorkerSettings, identity: ProcessIdentity, loaded: WorkerEngine) -> Role:
    engine, shared = loaded.engine, loaded.shared
    if shared is None:
        raise TwostrokeError("a decode worker's pool must be shared")
    offer, exports = make_offer(
        settings,
        identity.incarnation,
        shared.tensor,
        (shared.kind, shared.descriptor),
        number=secrets.randbits(64) or 1,
        pages=engine.plan.pages,
        page_bytes=engine.plan.page_bytes,
    )
    liveness = Liveness(identity.host, silence_s=settings.silence_s)
    links = LinkClient(identity, loaded.form, liveness, offer, channel=cluster_dialer(settings), exports=exports)
    handover = DecodeHandover(
        engine.core,
        links,
        engine.pool,
        pool_id=offer.pool,
        ticket_valid_s=settings.ticket_valid_s,
        digester=_digester(engine.pool),
        rehearse=engine.runner.rehearse,
    )

    async def stop() -> None:
        await links.stop()
        liveness.close()

    def close() -> None:
        handover.close()
        if exports is not None:
            exports.close()

    return Role(handover, None, links.want, stop, close)


async def _nothing_to_stop() -> None:
    """For a role without links."""
