"""What the gateway counts and measures, in Prometheus' text format."""

from collections.abc import Iterable
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from .admission import Admission
from .admission_figures import AdmissionFigures, count_refusals
from .board import Cell
from .fleet import Fleet
from .generation import Finish
from .transfer_figures import TransferFigures
from .wrong_keys import WrongKeys

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
FIRST_TOKEN_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10)
TOKEN_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5)
DURATION_S = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)


class Figures:
    """Of one gateway, over all doors; in a registry of its own."""

    def __init__(
        self, admission: Admission, fleet: Fleet, wrong: WrongKeys | None = None, folder: Path | None = None
    ) -> None:
        """`folder`: where several processes keep what they count; each then tells of all. Of one that died it is told
        on, as counts may not fall."""
        self._prompt_tokens = 0
        self._cached_tokens = 0
        self._board = admission.board
        registry = CollectorRegistry()
        self._registry = registry
        if folder is not None:
            self._registry = CollectorRegistry()
            MultiProcessCollector(self._registry, str(folder))  # type: ignore[no-untyped-call]
        self._registry.register(_State(admission, fleet))
        self._registry.register(AdmissionFigures(admission))
        self._registry.register(TransferFigures(fleet))
        count_refusals(registry, admission, wrong)
        self._responses = Counter(
            "twostroke_http_responses", "HTTP responses; 499: the client left.", ("path", "status"), registry=registry
        )
        self._failures = Counter("twostroke_failures", "Requests that failed.", ("error",), registry=registry)
        self._answers = Counter("twostroke_answers", "Answers that ended well.", ("reason",), registry=registry)
        self._prompt = Counter("twostroke_prompt_tokens", "Tokens of prompts.", registry=registry)
        self._cached = Counter("twostroke_cached_tokens", "Of these, found in a prefix cache.", registry=registry)
        self._output = Counter("twostroke_output_tokens", "Tokens generated.", registry=registry)
        self._replays = Counter("twostroke_replays", "Attempts beyond the first.", registry=registry)
        self._first = Histogram(
            "twostroke_time_to_first_token_seconds", "From arrival to token 0.", buckets=FIRST_TOKEN_S,
            registry=registry,
        )  # fmt: skip
        self._each = Histogram(
            "twostroke_time_per_output_token_seconds", "Mean over an answer, token 0 apart.", buckets=TOKEN_S,
            registry=registry,
        )  # fmt: skip
        self._total = Histogram(
            "twostroke_request_duration_seconds", "From arrival to the last token.", buckets=DURATION_S,
            registry=registry,
        )  # fmt: skip

    def responded(self, path: str, status: int) -> None:
        """An HTTP response, by its route."""
        self._responses.labels(path, str(status)).inc()

    def failed(self, error: str) -> None:
        """A request failed; the name of its class."""
        self._failures.labels(error).inc()

    def finished(self, finish: Finish, sample: int) -> None:
        """An answer ended. A prompt's tokens count with its first one."""
        times = finish.timings
        self._answers.labels(finish.reason.name.lower()).inc()
        self._output.inc(finish.output_tokens)
        if sample == 0:
            self._prompt_tokens += finish.prompt_tokens
            self._cached_tokens += finish.cached_tokens
            self._prompt.inc(finish.prompt_tokens)
            self._cached.inc(finish.cached_tokens)
            self._board.tell(Cell.PROMPT, self._prompt_tokens)
            self._board.tell(Cell.CACHED, self._cached_tokens)
        self._replays.inc(finish.replays)
        self._first.observe(times.first_token)
        self._total.observe(times.total)
        if finish.output_tokens > 1:
            self._each.observe(times.decode / (finish.output_tokens - 1))

    def cached_share(self) -> float:
        """Of all prompts' tokens, those found in a prefix cache."""
        prompt = self._board.total(Cell.PROMPT)
        return self._board.total(Cell.CACHED) / prompt if prompt else 0.0

    def text(self) -> bytes:
        """All of it."""
        return generate_latest(self._registry)


class _State(Collector):
    """Read when asked for."""

    def __init__(self, admission: Admission, fleet: Fleet) -> None:
        self._admission = admission
        self._fleet = fleet

    def describe(self) -> Iterable[Metric]:
        """Nothing is known ahead."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """The gateway's and each worker's."""
        yield GaugeMetricFamily(
            "twostroke_answers_inside", "Answers under way.", value=self._admission.board.total(Cell.INSIDE)
        )
        names = ("worker", "role")
        gauges = {
            "draining": GaugeMetricFamily("twostroke_worker_draining", "It takes nothing new.", labels=names),
            "pages": GaugeMetricFamily("twostroke_worker_pages", "KV pages.", labels=names),
            "free": GaugeMetricFamily("twostroke_worker_free_pages", "KV pages free or evictable.", labels=names),
            "running": GaugeMetricFamily("twostroke_worker_running", "Sequences that run.", labels=names),
            "waiting": GaugeMetricFamily("twostroke_worker_waiting", "Sequences that wait.", labels=names),
            "tokens": GaugeMetricFamily("twostroke_worker_waiting_tokens", "Prompt tokens that wait.", labels=names),
        }
        for load in self._fleet.loads():
            session = self._fleet.session(load.incarnation)
            labels = (load.name, load.role.name.lower())
            gauges["draining"].add_metric(labels, int(load.draining))
            gauges["pages"].add_metric(labels, load.pages)
            gauges["free"].add_metric(labels, load.free_pages)
            gauges["running"].add_metric(labels, session.status.running)
            gauges["waiting"].add_metric(labels, session.status.waiting)
            gauges["tokens"].add_metric(labels, load.waiting_tokens)
        yield from gauges.values()
