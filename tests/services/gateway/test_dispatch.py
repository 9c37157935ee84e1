"""What the dispatcher remembers of workers; the routes themselves are tested with the router and the attempts."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from twostroke.engine.request import SamplingParams
from twostroke.services.gateway.dispatch import Dispatcher, Job
from twostroke.services.gateway.generation import GenerationRequest
from twostroke.services.gateway.prefixes import CachedPages
from twostroke.services.gateway.router import Role, WorkerLoad


@dataclass
class Loads:
    """The part of a fleet that routing asks."""

    living: list[WorkerLoad] = field(default_factory=list)

    def loads(self) -> list[WorkerLoad]:
        return self.living

    def session(self, incarnation: int) -> SimpleNamespace:
        return SimpleNamespace(incarnation=incarnation, cached=CachedPages(100), cache_root=b"root")


def worker(incarnation: int) -> WorkerLoad:
    return WorkerLoad(
        name=f"both-{incarnation}", incarnation=incarnation, role=Role.BOTH, pages=100, page_size=16, max_batch=8,
        max_tokens=1000, free_pages=100,
    )  # fmt: skip


def test_workers_that_are_gone_are_forgotten() -> None:
    fleet: Any = Loads()
    dispatcher = Dispatcher(fleet)
    job = Job(GenerationRequest(input=None), list(range(40)), SamplingParams(max_tokens=5), None)
    for incarnation in range(1, 200):  # one worker that is restarted again and again
        fleet.living = [worker(1000), worker(incarnation)]
        dispatcher._route(job, [], set())
        known = set().union(*dispatcher._expected._sent.values())
        assert known <= {1000, incarnation}
        assert known
