"""By which transports a worker's KV goes, as its settings and its machine have it."""

import logging
from typing import TYPE_CHECKING

from torch import Tensor

from ...errors import ConfigError
from ...kvtransfer.nixl_agent import why_missing
from ...kvtransfer.nixl_export import NixlExport
from ..handover.gpu_pool import cuda_opener
from ..handover.kv_pool import NixlOpener, shm_opener
from ..handover.pool_exports import PoolExports
from ..handover.pool_opener import Open, PoolOpener
from ..handover.wire_link import PoolOffer
from ..settings import WorkerSettings

if TYPE_CHECKING:
    from ...kvtransfer.cuda_source import CudaSource

log = logging.getLogger(__name__)

NIXL = "nixl"
LEAST_GB_PER_S = {"cuda_ipc": 10.0, "shm": 0.2, NIXL: 0.05}
"""What less than is a fault: PCIe gives 20 and more, memory on a busy machine 1, Ethernet of 1 Gbit/s 0.1."""


def check_transport(settings: WorkerSettings) -> None:
    """ConfigError (transport) where the one that is asked for cannot be had."""
    local = local_transport(settings)
    if settings.transport not in ("auto", local, NIXL):
        raise ConfigError(
            f"transport: {settings.transport} does not go with device {settings.device}: auto, {local} or {NIXL} do",
            field="transport",
        )
    if settings.transport == NIXL and (reason := why_missing()):
        raise ConfigError(f"transport: {reason}", field="transport")


def local_transport(settings: WorkerSettings) -> str:
    """Within a host."""
    return "shm" if settings.engine_options().device_type == "cpu" else "cuda_ipc"


def allowed(settings: WorkerSettings) -> list[str]:
    """Transports that this worker takes, fastest first."""
    if settings.transport != "auto":
        return [settings.transport]
    reason = why_missing()
    if reason:
        log.info("KV goes within this host only: %s", reason)
    return [local_transport(settings)] + ([] if reason else [NIXL])


def make_opener(
    settings: WorkerSettings,
    incarnation: int,
    pool: Tensor,  # [layers, pages, 2, kv_heads, page_size, head_dim]
    source: "CudaSource | None",
) -> PoolOpener:
    """A prefill worker's. `incarnation`: ours. `source`: its pool, where that is in a GPU."""
    nixl = NixlOpener(pool, incarnation, None if source is None else source.marks)
    all_ways: dict[str, Open] = {NIXL: nixl}
    all_ways |= {"shm": shm_opener(pool)} if source is None else {"cuda_ipc": cuda_opener(source)}
    least = settings.transport_gb_per_s
    return PoolOpener(
        {name: all_ways[name] for name in allowed(settings)},
        least=LEAST_GB_PER_S if least is None else dict.fromkeys(LEAST_GB_PER_S, least),
        allow_slow=settings.allow_slow_transport,
        close=nixl.close,
    )


def make_offer(
    settings: WorkerSettings,
    incarnation: int,
    pool: Tensor,  # [nbytes] uint8
    local: tuple[str, bytes],
    *,
    number: int,
    pages: int,
    page_bytes: int,
) -> tuple[PoolOffer, PoolExports | None]:
    """A decode worker's. `local`: transport within the host, and its descriptor. `number`: names the pool."""
    ways = [local if name == local[0] else (name, b"") for name in allowed(settings)]
    (transport, descriptor), *further = ways
    offer = PoolOffer(number, pages, page_bytes, descriptor, transport, tuple(further))
    exports = PoolExports(NIXL, lambda: NixlExport(pool, incarnation)) if any(n == NIXL for n, _ in ways) else None
    return offer, exports
