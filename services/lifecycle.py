"""The coroutine that a request lives in, from arrival to its last token; whatever door it came through.

Validate, admit, tokenize, refuse what can never fit, route, submit to both workers at once, merge, answer. Whatever
ends it (the last token, a stop string, the deadline, a cancel, a lost worker, a client that does not read), everything
that it holds is freed on the way out: its place, its parts at the workers, its queue.
"""

import logging
import secrets
import time
from dataclasses import dataclass
from itertools import count

from ..engine.request import SamplingParams, SequenceKey, Work
from ..errors import DeadlineExceeded, TwostrokeError
from ..v1 import worker_pb2 as pb
from .admission import Admission
from .answer import Answer
from .fleet import Fleet
from .flight import Flight, Part
from .generation import GenerationRequest, Input, Piece, Send
from .guard import Guard
from .inbox import Inbox
from .router import MAX_HASHES, PrefixAffinity, Role, Route, choose, prefix_hashes
from .served_model import ServedModel
from .validation import check_input, check_length, clean_traceparent, output_limit, validate
from .wire_gateway import make_submit

AFFINITY_PAGES = 64 * MAX_HASHES

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Job:
    """A request that is ready to be routed."""

    request: GenerationRequest
    prompt_ids: list[int]
    params: SamplingParams
    deadline: float | None  # time.monotonic()

    def timeout_s(self) -> float | None:
        """Time left."""
        return None if self.deadline is None else self.deadline - time.monotonic()


class Lifecycle:
    """What all doors share; one loop owns it."""

    def __init__(
        self,
        model: ServedModel,
        fleet: Fleet,
        admission: Admission,
        *,
        incarnation: int,
        stream_buffer_bytes: int,
        slow_reader_s: float,
    ) -> None:
        """`incarnation`: of this gateway. `stream_buffer_bytes`: kept at most for a client that does not keep up."""
        self.model = model
        self.fleet = fleet
        self._admission = admission
        self._incarnation = incarnation
        self._stream_buffer_bytes = stream_buffer_bytes
        self._slow_reader_s = slow_reader_s
        self._affinity = PrefixAffinity(AFFINITY_PAGES)
        self._numbers = count(1)
        self._guards: set[Guard] = set()
        self._prefill_missed = False

    async def generate(self, request: GenerationRequest, send: Send) -> None:
        """Runs a request; `send` gets the pieces of its answer. Raises what the caller shall be told."""
        arrival = time.monotonic()
        if request.timeout_s is not None and request.timeout_s <= 0:
            raise DeadlineExceeded("the deadline had passed on arrival")
        source = validate(request, self.model)
        with self._admission.slot():
            guard = Guard(request.timeout_s, self._slow_reader_s)
            self._guards.add(guard)
            try:
                async with guard.watching():
                    job = await self._prepare(request, source, arrival)
                    await self._run(job, guard, send, arrival)
            finally:
                self._guards.discard(guard)

    def end_all(self, error: TwostrokeError) -> None:
        """Ends every request that is inside, with this error."""
        for guard in list(self._guards):
            guard.end(error)

    async def tokenize(self, model: str, source: Input | None) -> list[int]:
        """The ids that `generate` would run."""
        self.model.check_name(model)
        source = check_input(source, self.model)
        with self._admission.slot():
            return await self.model.prompt_ids(source)

    async def _prepare(self, request: GenerationRequest, source: Input, arrival: float) -> _Job:
        """Tokens and complete parameters; refuses what can never fit."""
        prompt_ids = await self.model.prompt_ids(source)
        check_length(len(prompt_ids), self.model)
        sampling, stopping = request.sampling, request.stopping
        params = SamplingParams(
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            seed=secrets.randbits(64) if sampling.seed is None else sampling.seed,
            max_tokens=output_limit(len(prompt_ids), stopping.max_tokens, self.model, self.fleet.largest()),
            stop_token_ids=stopping.token_ids,
            ignore_eos=stopping.ignore_eos,
            logprobs=request.logprobs,
        )
        deadline = None if request.timeout_s is None else arrival + request.timeout_s
        return _Job(request, prompt_ids, params, deadline)

    async def _run(self, job: _Job, guard: Guard, send: Send, arrival: float) -> None:
        """From routing to the last piece."""
        answer = Answer(
            self.model.detokenizer(),
            job.request.stopping.strings,
            prompt_tokens=len(job.prompt_ids),
            seed=job.params.seed,
            logprobs=job.params.logprobs is not None,
            arrival=arrival,
        )
        flight = self._new_flight(job, guard)
        try:
            self._launch(flight, job)
            while True:
                tokens = await flight.take()
                if not tokens and flight.finish is None:
                    continue
                piece = answer.piece(tokens, flight.finish, flight.report())
                if piece.finish is not None:
                    flight.close()  # before the client takes the last piece: it may be slow
                    _log(job, piece)
                await guard.write(send, piece)
                if piece.finish is not None:
                    return
        except TwostrokeError as error:
            logger.info("request %s failed: %s", job.request.request_id, type(error).__name__)
            raise
        finally:
            flight.close()

    def _new_flight(self, job: _Job, guard: Guard) -> Flight:
        key = SequenceKey(self._incarnation, next(self._numbers), 0, 0)
        return Flight(key, Inbox(self._stream_buffer_bytes, guard.too_slow), job.params.max_tokens)

    def _launch(self, flight: Flight, job: _Job) -> None:
        """Routes and submits, to both workers in the same turn of the loop. Unavailable where nobody can take it."""
        loads = self.fleet.loads()
        if not loads:
            raise self.fleet.unavailable()
        hashes = prefix_hashes(job.prompt_ids, loads[0].page_size, job.request.cache_salt)
        route = choose(loads, len(job.prompt_ids), job.params.max_tokens, self._affinity.lookup(hashes))
        if route is None:
            raise self.fleet.unavailable()
        self._affinity.record(hashes, [worker for worker in (route.prefill, route.decode) if worker is not None])
        decode = self.fleet.session(route.decode)
        self._tell_mode(alone=route.prefill is None and decode.load.role is Role.DECODE)
        if route.prefill is None:
            part = Part(decode, prefills=True, decodes=True, tokens=route.prefill_tokens, pages=route.pages)
            flight.launch(part, self._submit(flight.key, job, Work.ALL, None, route))
            return
        prefill = self.fleet.session(route.prefill)
        part = Part(prefill, prefills=True, decodes=False, tokens=route.prefill_tokens, pages=route.pages)
        flight.launch(part, self._submit(flight.key, job, Work.PREFILL, decode.peer, route))
        part = Part(decode, prefills=False, decodes=True, tokens=0, pages=route.pages)
        flight.launch(part, self._submit(flight.key, job, Work.DECODE, prefill.peer, route))

    def _tell_mode(self, *, alone: bool) -> None:
        """Says once when decode workers begin to compute prompts themselves, and when that is over."""
        if alone and not self._prefill_missed:
            logger.warning("no prefill worker: decode workers compute prompts themselves, slower")
        elif self._prefill_missed and not alone:
            logger.info("prompts are computed by prefill workers again")
        self._prefill_missed = alone

    def _submit(self, key: SequenceKey, job: _Job, work: Work, peer: pb.Peer | None, route: Route) -> pb.Submit:
        return make_submit(
            key,
            work,
            job.prompt_ids,
            job.params,
            peer=peer,
            start_now=route.start_now,
            timeout_s=job.timeout_s(),
            cache_salt=job.request.cache_salt,
            traceparent=clean_traceparent(job.request.traceparent),
        )


def _log(job: _Job, piece: Piece) -> None:
    finish = piece.finish
    if finish is not None:
        logger.info(
            "request %s: %d prompt tokens (%d cached), %d output tokens, %s, prefill %s, decode %s, "
            "first token %.1f ms, total %.1f ms",
            job.request.request_id,
            finish.prompt_tokens,
            finish.cached_tokens,
            finish.output_tokens,
            finish.reason.name.lower(),
            finish.prefill_worker,
            finish.decode_worker,
            finish.timings.first_token * 1e3,
            finish.timings.total * 1e3,
        )
