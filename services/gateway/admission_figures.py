"""What admission knows, for Prometheus."""

import math
from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from .admission import Admission
from .wrong_keys import WrongKeys


class AdmissionFigures(Collector):
    """Read when asked for."""

    def __init__(self, admission: Admission, wrong: WrongKeys | None = None) -> None:
        self._admission = admission
        self._wrong = wrong

    def describe(self) -> Iterable[Metric]:
        """Nothing is known ahead."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """The queue, how fast it empties, and whom it refused."""
        admission, queue = self._admission, self._admission.queue
        yield GaugeMetricFamily("twostroke_queue_places", "Places taken.", value=queue.places)
        yield GaugeMetricFamily("twostroke_queue_places_limit", "Places in all.", value=queue.most)
        yield GaugeMetricFamily("twostroke_queue_tokens", "Tokens to be computed for those inside.", value=queue.tokens)
        yield GaugeMetricFamily(
            "twostroke_queue_tokens_limit", "Tokens that may be.", value=admission.max_tokens or math.inf
        )
        rates = GaugeMetricFamily(
            "twostroke_queue_drain_rate", "Tokens and places that are done with, a second.", labels=("unit",)
        )
        for unit, rate in (("tokens", queue.drain.tokens), ("places", queue.drain.places)):
            if rate is not None:
                rates.add_metric((unit,), rate)
        yield rates
        refusals = CounterMetricFamily(
            "twostroke_refusals", "Requests refused at the door, or displaced.", labels=("reason", "tenant")
        )
        for (reason, tenant), count in sorted(admission.refusals.items()):
            refusals.add_metric((reason, tenant), count)
        yield refusals
        if self._wrong is not None:
            yield CounterMetricFamily("twostroke_wrong_keys", "Keys and tokens not taken.", value=self._wrong.failures)
            yield CounterMetricFamily(
                "twostroke_wrong_keys_refused",
                "Calls refused, as too many wrong keys had come from their address.",
                value=self._wrong.refusals,
            )
