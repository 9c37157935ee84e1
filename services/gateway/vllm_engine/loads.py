"""How busy the workers are, all together, as routers read it of one engine."""

from collections.abc import Sequence
from datetime import UTC, datetime

from .... import __version__
from ....smg import vllm_engine_pb2 as pb
from ..figures import Figures
from ..fleet import Fleet
from ..router import Role
from ..worker_session import WorkerSession

INT32 = (1 << 31) - 1


def loads_response(fleet: Fleet, figures: Figures, request: pb.GetLoadsRequest) -> pb.GetLoadsResponse:
    """Of the one rank that there is, unless another one is asked for."""
    sessions = [fleet.session(load.incarnation) for load in fleet.loads()]
    loads = [] if request.dp_rank else [scheduler_load(sessions, figures.cached_share())]
    return pb.GetLoadsResponse(
        timestamp=datetime.now(UTC).isoformat(), version=__version__, dp_rank_count=1, loads=loads
    )


def scheduler_load(sessions: Sequence[WorkerSession], cached_share: float) -> pb.SchedulerLoad:
    """Each request is at a decode worker from its first moment on, so theirs are the requests; prompts wait at any."""
    decoding = [session for session in sessions if session.load.role is not Role.PREFILL]
    total = sum(session.load.sequences for session in decoding)
    running = min(total, sum(session.status.running for session in decoding))
    tokens = sum(session.load.pages * session.load.page_size for session in decoding)
    used = sum((session.load.pages - session.load.free_pages) * session.load.page_size for session in decoding)
    usage = used / tokens if tokens else 0.0
    return pb.SchedulerLoad(
        num_running_reqs=_int32(running),
        num_waiting_reqs=_int32(total - running),
        num_total_reqs=_int32(total),
        num_used_tokens=_int32(used),
        max_total_num_tokens=_int32(tokens),
        token_usage=usage,
        gen_throughput=sum(_throughput(session) for session in decoding),
        cache_hit_rate=cached_share,
        utilization=usage,
        max_running_requests=_int32(sum(session.load.max_batch for session in decoding)),
        num_waiting_uncached_tokens=_int32(sum(session.load.waiting_tokens for session in sessions)),
    )


def _throughput(session: WorkerSession) -> float:
    """Tokens a second."""
    step_s = session.load.decode_step_s
    return min(session.status.running, session.load.max_batch) / step_s if step_s > 0 else 0.0


def _int32(value: int) -> int:
    return min(INT32, value)
