"""Takes an attempt of a request to its workers: routes it and submits its parts."""

import logging
import random
import time
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

from ...engine.request import SamplingParams, Work
from ...v1 import worker_pb2 as pb
from .fleet import Fleet
from .flight import Flight, Part
from .generation import GenerationRequest
from .placement import Placement
from .prefixes import MAX_DIGESTS, ExpectedPages, prefix_digests
from .prompt_scores import PromptScores
from .router import Role, Route, WorkerLoad, choose
from .validation import clean_traceparent
from .wire_gateway import make_submit

EXPECTED_PAGES = 64 * MAX_DIGESTS
SURE_S = 0.5  # of work that a worker was seen for lately, from which on its speed is taken for known

Routing = Literal["prefix", "load", "random"]
"""By cached prefix and load; by load alone; or at random, to compare with."""

Disaggregate = Literal["auto", "always"]
"""Prompts are computed by a prefill worker where that costs less, or wherever there is one."""

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Job:
    """A request that is ready to be routed."""

    request: GenerationRequest
    prompt_ids: list[int]
    params: SamplingParams
    deadline: float | None  # time.monotonic()
    scores: PromptScores = field(default_factory=lambda: PromptScores(None))
    on_route: Callable[[int, float, float | None], None] | None = None
    """Told at first how many tokens of the prompt are to be computed, for how many seconds the worker that is to do
    that is busy with others, and how many are left until the deadline; may raise, and then nothing is sent."""

    def timeout_s(self) -> float | None:
        """Time left."""
        return None if self.deadline is None else self.deadline - time.monotonic()


class Dispatcher:
    """What all requests share; one loop owns it."""

    def __init__(
        self, fleet: Fleet, *, routing: Routing = "prefix", disaggregate: Disaggregate = "auto", local_tokens: int = 0
    ) -> None:
        """`local_tokens`: a decode worker that has to compute no more of a prompt does that itself."""
        self.fleet = fleet
        self._routing = routing
        self._local_tokens = local_tokens
        self._placement = Placement()
        self._weigh = self._placement.weigh if disaggregate == "auto" else None
        self._expected = ExpectedPages(EXPECTED_PAGES)
        self._living: frozenset[int] = frozenset()  # incarnations of which something may be expected
        self._prefill_missed = False

    def launch(
        self, flight: Flight, job: Job, output_ids: list[int], avoid: Set[int], siblings: Sequence[Flight] = ()
    ) -> None:
        """Routes and submits, to both workers in the same turn of the loop. Unavailable where nobody can take it.

        `output_ids`: what the client has already. `avoid`: incarnations that are taken only if no others can.
        `siblings`: the further samples, in order, that the workers shall draw from the same prompt.
        """
        samples = [flight, *siblings]
        route = self._route(job, output_ids, avoid, len(samples))
        if job.on_route is not None and flight.key.attempt == 0:
            job.on_route(route.prefill_tokens, self._wait_s(route), job.timeout_s())
        for sample in samples:
            sample.route = route.reason
        logger.debug("request %s: %s", job.request.request_id, route.reason)
        decode = self.fleet.session(route.decode)
        alone = route.prefill is None and decode.load.role is Role.DECODE
        self._tell_mode(alone=alone and not self.fleet.count(Role.PREFILL))
        if route.prefill is None:
            part = Part(decode, prefills=True, decodes=True, tokens=route.prefill_tokens, pages=route.pages)
            _start(samples, part, self._submit(samples, job, output_ids, Work.ALL, None, route))
            return
        prefill = self.fleet.session(route.prefill)
        moved = route.moved_tokens * prefill.load.kv_token_bytes
        flight.on_transfer = partial(self._placement.transferred, route.prefill, route.decode, moved)
        part = Part(prefill, prefills=True, decodes=False, tokens=route.prefill_tokens, pages=route.pages)
        _start(samples, part, self._submit(samples, job, output_ids, Work.PREFILL, decode.peer, route))
        part = Part(decode, prefills=False, decodes=True, tokens=0, pages=route.pages)
        _start(samples, part, self._submit(samples, job, output_ids, Work.DECODE, prefill.peer, route))

    def _route(self, job: Job, output_ids: list[int], avoid: Set[int], samples: int = 1) -> Route:
        loads = self.fleet.loads()
        if not loads:
            raise self.fleet.unavailable()
        self._forget_the_gone(loads)
        known = [*job.prompt_ids, *output_ids]
        session = self.fleet.session(loads[0].incarnation)  # all have one model and format
        chain = prefix_digests(known, loads[0].page_size, session.cache_root, job.request.cache_salt)
        met: dict[int, int] = {}
        if job.scores.complete:  # else all of the prompt is to be computed anew
            met = self._met(loads, chain)
        left = job.params.max_tokens - len(output_ids)

        def chosen(among: list[WorkerLoad]) -> Route | None:
            return choose(among, len(known), left, met, samples, local_tokens=self._local_tokens, weigh=self._weigh)

        able = [load for load in loads if load.incarnation not in avoid]
        if self._routing == "random":
            able = [random.choice(found) for role in Role if (found := [load for load in able if load.role is role])]
        route = chosen(able) or chosen(loads)
        if route is None:
            raise self.fleet.unavailable()
        self._expected.record(chain, [worker for worker in (route.prefill, route.decode) if worker is not None])
        return route

    def _wait_s(self, route: Route) -> float:
        """Seconds for which other prompts keep the worker busy that is to compute this one; 0 where that is not known
        well enough."""
        worker = self.fleet.session(route.decode if route.prefill is None else route.prefill).load
        rate = worker.prompt_rate
        if rate.last is None or rate.evidence(time.monotonic()) < SURE_S:
            return 0.0
        return worker.waiting_tokens / rate.last

    def _met(self, loads: list[WorkerLoad], chain: list[bytes]) -> dict[int, int]:
        """Leading pages of the prompt that workers have, by their own word, or were sent a moment ago."""
        if self._routing != "prefix" or not chain:
            return {}
        met = self._expected.lookup(chain)
        sessions = [self.fleet.session(load.incarnation) for load in loads]
        for session in [session for session in sessions if chain[0] in session.cached]:
            pages = session.cached.leading(chain)
            met[session.incarnation] = max(pages, met.get(session.incarnation, 0))
        return met

    def _forget_the_gone(self, loads: list[WorkerLoad]) -> None:
        """What a worker had cached went with it; else each restart would leave an incarnation at its pages for good."""
        living = frozenset(load.incarnation for load in loads)
        if self._living - living:
            self._expected.forget(living)
            self._placement.forget(living)
        self._living = living

    def _tell_mode(self, *, alone: bool) -> None:
        """Says once when decode workers begin to compute prompts themselves, and when that is over."""
        if alone and not self._prefill_missed:
            logger.warning("no prefill worker: decode workers compute prompts themselves, slower")
        elif self._prefill_missed and not alone:
            logger.info("prompts are computed by prefill workers again")
        self._prefill_missed = alone

    def _submit(
        self, samples: Sequence[Flight], job: Job, output_ids: list[int], work: Work, peer: pb.Peer | None, route: Route
    ) -> pb.Submit:
        params = replace(job.params, prompt_logprobs=None) if job.scores.complete else job.params
        return make_submit(
            samples[0].key,
            work,
            job.prompt_ids,
            params,
            output_ids=output_ids,
            samples=len(samples),
            peer=peer,
            start_now=route.start_now,
            timeout_s=job.timeout_s(),
            cache_salt=job.request.cache_salt,
            traceparent=clean_traceparent(job.request.traceparent),
            priority=job.request.priority,
        )


def _start(samples: Sequence[Flight], part: Part, submit: pb.Submit) -> None:
    """One message for all samples. The prompt is charged once, and a page to each further one that decodes there."""
    samples[0].launch(part, submit)
    for sibling in samples[1:]:
        sibling.join(replace(part, tokens=0, pages=int(part.decodes)))
