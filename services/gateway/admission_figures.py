"""What admission knows, for Prometheus."""

import math
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from .admission import Admission
from .wrong_keys import WrongKeys


class AdmissionFigures(Collector):
    """Read when asked for, of all processes that share the queue."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission

    def describe(self) -> Iterable[Metric]:
        """Nothing is known ahead."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """The queue, how fast it empties, and whom it refused."""
        admission, queue = self._admission, self._admission.queue
        yield GaugeMetricFamily("twostroke_queue_places", "Places taken.", value=queue.all_places)
        yield GaugeMetricFamily("twostroke_queue_places_limit", "Places in all.", value=queue.most)
        yield GaugeMetricFamily(
            "twostroke_queue_tokens", "Tokens to be computed for those inside.", value=queue.all_tokens
        )
        yield GaugeMetricFamily(
            "twostroke_queue_tokens_limit", "Tokens that may be.", value=admission.max_tokens or math.inf
        )
        rates = GaugeMetricFamily(
            "twostroke_queue_drain_rate", "Tokens and places that are done with, a second.", labels=("unit",)
        )
        for unit, rate in (("tokens", queue.tokens_rate), ("places", queue.places_rate)):
            if rate is not None:
                rates.add_metric((unit,), rate)
        yield rates


def count_refusals(registry: CollectorRegistry, admission: Admission, wrong: WrongKeys | None) -> None:
    """Of this process; `registry` has the counters."""
    refusals = Counter(
        "twostroke_refusals",
        "Requests refused at the door, or displaced.",
        ("reason", "tenant"),
        registry=registry,
    )
    admission.on_refusal = lambda reason, tenant: refusals.labels(reason, tenant).inc()
    if wrong is None:
        return
    failures = Counter("twostroke_wrong_keys", "Keys and tokens not taken.", registry=registry)
    wrong.on_failure = failures.inc
    refused = Counter(
        "twostroke_wrong_keys_refused",
        "Calls refused, as too many wrong keys had come from their address.",
        registry=registry,
    )
    wrong.on_refusal = refused.inc
