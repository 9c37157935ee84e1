"""What workers tell of KV on its way between them, in Prometheus' format."""

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from .fleet import Fleet
from .router import WorkerLoad
from .worker_session import MAX_PAIRS, WorkerSession

TRANSPORTS = frozenset({"shm", "cuda_ipc", "nixl"})


class TransferFigures(Collector):
    """Of the workers that are connected, as their last statuses say; counts begin anew with a worker's process."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def describe(self) -> Iterable[Metric]:
        """Nothing is known ahead."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """Each worker's counts, and what was measured between two of them."""
        names = ("worker", "role")
        pushed = CounterMetricFamily("twostroke_worker_pushed_pages", "KV pages sent to decode workers.", labels=names)
        tickets = CounterMetricFamily("twostroke_worker_tickets", "Hand-overs begun.", labels=names)
        damaged = CounterMetricFamily(
            "twostroke_worker_damaged_pages",
            "KV pages whose digests did not match, by what was done: sent again, or the hand-over given up.",
            labels=(*names, "outcome"),
        )
        given_up = CounterMetricFamily(
            "twostroke_worker_damaged_handovers",
            "Hand-overs given up because of that: their prompts are computed anew.",
            labels=names,
        )
        preempted = CounterMetricFamily(
            "twostroke_worker_preemptions", "Sequences that lost their pages for want of room.", labels=names
        )
        loads = self._fleet.loads()
        for load in loads:
            status = self._fleet.session(load.incarnation).status
            labels = (load.name, load.role.name.lower())
            pushed.add_metric(labels, status.pushed_pages)
            tickets.add_metric(labels, status.tickets)
            damaged.add_metric((*labels, "resent"), status.resent_pages)
            damaged.add_metric((*labels, "given_up"), max(0, status.damaged_pages - status.resent_pages))
            given_up.add_metric(labels, status.damaged_tickets)
            preempted.add_metric(labels, status.preemptions)
        yield from (pushed, tickets, damaged, given_up, preempted)
        yield _speeds(loads, {load.incarnation: self._fleet.session(load.incarnation) for load in loads})


def _speeds(loads: Iterable[WorkerLoad], sessions: dict[int, WorkerSession]) -> Metric:
    """Between workers that are both connected, so that there are no more series than pairs of them."""
    speeds = GaugeMetricFamily(
        "twostroke_pair_bytes_per_second",
        "How fast KV goes between two workers, as measured when they met.",
        labels=("prefill", "decode", "transport"),
    )
    for load in loads:
        for pair in sessions[load.incarnation].status.pairs[:MAX_PAIRS]:
            reader = sessions.get(pair.reader)
            if reader is not None and pair.transport in TRANSPORTS:
                speeds.add_metric((load.name, reader.name, pair.transport), pair.gb_per_s * 1e9)
    return speeds
