"""The coroutine that a request lives in, from arrival to its last token; whatever door it came through.

Validate, admit, tokenize, refuse what can never fit, route, submit to both workers at once, merge, answer. Whatever
ends it (the last token, a stop string, the deadline, a cancel, a lost worker, a client that does not read), everything
that it holds is freed on the way out: its place, its parts at the workers, its queue.
"""

import asyncio
import logging
import time
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from itertools import count

from ...engine.request import SequenceKey
from ...errors import DeadlineExceeded, TwostrokeError
from ..security.tenant import current_tenant
from .admission import Admission
from .answer import Answer
from .attempts import Attempts
from .constraint_checks import ConstraintChecks
from .dispatch import Disaggregate, Dispatcher, Job, Routing
from .figures import Figures
from .fleet import Fleet
from .generation import GenerationRequest, Input, Piece, Send
from .guard import Guard
from .inbox import Inbox
from .parameters import complete_params
from .place import Place
from .prompt_scores import PromptScores
from .served_model import ServedModel
from .turns import Turns
from .validation import check_input, check_length, check_width, validate

logger = logging.getLogger(__name__)


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
        max_attempts: int = 3,
        replay_wait_s: float = 30.0,
        routing: Routing = "prefix",
        disaggregate: Disaggregate = "auto",
        local_prefill_tokens: int = 0,
        figures: Figures | None = None,
        constraints: ConstraintChecks | None = None,
    ) -> None:
        """`incarnation`: of this gateway. `stream_buffer_bytes`: kept at most for a client that does not keep up.
        `max_attempts`, `replay_wait_s`: see `Attempts`. `routing`, `disaggregate`,
        `local_prefill_tokens`: see `Dispatcher`. `figures`: are told how requests end.
        `constraints`: None checks their texts only."""
        self.model = model
        self.fleet = fleet
        self._admission = admission
        self._incarnation = incarnation
        self._stream_buffer_bytes = stream_buffer_bytes
        self._slow_reader_s = slow_reader_s
        self._max_attempts = max_attempts
        self._replay_wait_s = replay_wait_s
        self._dispatcher = Dispatcher(
            fleet, routing=routing, disaggregate=disaggregate, local_tokens=local_prefill_tokens
        )
        self._figures = figures
        self._constraints = constraints or ConstraintChecks(None)
        self._numbers = count(1)
        self._guards: set[Guard] = set()
        self._turns = Turns()

    async def generate(self, request: GenerationRequest, send: Send) -> None:
        """Runs a request; `send` gets the pieces of its answer. Raises what the caller shall be told."""
        arrival = time.monotonic()
        if request.timeout_s is not None and request.timeout_s <= 0:
            raise DeadlineExceeded("the deadline had passed on arrival")
        source = validate(request, self.model)
        request = replace(request, cache_salt=request.tenant.cache_salt(request.cache_salt))
        with self._admission.slot(request.n, request.tenant, priority=request.priority) as place:
            guard = Guard(request.timeout_s, self._slow_reader_s, alone=request.n == 1)
            self._guards.add(guard)
            try:
                async with guard.watching():
                    place.displaceable(lambda: guard.end(self._admission.displaced(request.tenant)))
                    job = await self._prepare(request, source, arrival)
                    place.expect(len(job.prompt_ids), job.params.max_tokens)
                    job.on_route = place.routed
                    await self._run(job, place, guard, send, arrival)
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
        with self._admission.slot(tenant=current_tenant(), counted=False):
            return await self.model.prompt_ids(source)

    async def _prepare(self, request: GenerationRequest, source: Input, arrival: float) -> Job:
        """Tokens and complete parameters; refuses what can never fit."""
        prompt_ids = await self.model.prompt_ids(source)
        check_length(len(prompt_ids), self.model)
        check_width(request.n, self.fleet.widest())
        await self._constraints.check(request.sampling.constraint, request.tenant.name)
        params = complete_params(request, len(prompt_ids), self.model, self.fleet.largest())
        scores = PromptScores(None if request.prompt_logprobs is None else len(prompt_ids))
        deadline = None if request.timeout_s is None else arrival + request.timeout_s
        return Job(request, prompt_ids, params, deadline, scores)

    async def _run(self, job: Job, place: Place, guard: Guard, send: Send, arrival: float) -> None:
        """From routing to the last piece of each answer. All are launched as one; from there each goes by itself."""
        number = next(self._numbers)
        samples = [self._new_attempts(job, guard, number, sample) for sample in range(job.request.n)]
        try:
            samples[0].start(samples[1:])
            answers = [self._new_answer(job, arrival, sample) for sample in range(job.request.n)]
            await together(
                [
                    self._write(job, place, attempts, answer, guard, send)
                    for attempts, answer in zip(samples, answers, strict=True)
                ]
            )
        except TwostrokeError as error:
            logger.info("request %s failed: %s", job.request.request_id, type(error).__name__)
            if self._figures is not None:
                self._figures.failed(type(error).__name__)
            raise
        finally:
            for attempts in samples:
                attempts.close()

    async def _write(
        self, job: Job, place: Place, attempts: Attempts, answer: Answer, guard: Guard, send: Send
    ) -> None:
        """One answer to its last piece."""
        try:
            while True:
                tokens = await attempts.take()
                finish = attempts.finish
                if not tokens and finish is None:
                    continue
                piece = answer.piece(tokens, finish, attempts.report)
                place.took(piece.sample, len(tokens))
                if piece.finish is not None:
                    attempts.close()  # before the client takes the last piece: it may be slow
                    place.ended(piece.sample)
                    _log(job, piece)
                    if self._figures is not None:
                        self._figures.finished(piece.finish, piece.sample)
                await guard.write(send, piece)
                if piece.finish is not None:
                    return
        except Exception:
            await guard.still()
            raise

    def _new_answer(self, job: Job, arrival: float, sample: int) -> Answer:
        request, stopping = job.request, job.request.stopping
        return Answer(
            self.model.text_stream(
                skip_special=request.skip_special_tokens,
                shown=request.shown_tokens,
                verbatim=request.sampling.constraint is not None,
            ),
            stopping.strings,
            prompt_tokens=len(job.prompt_ids),
            seed=job.params.seed,
            logprobs=job.params.logprobs is not None,
            arrival=arrival,
            min_tokens=stopping.min_tokens,
            include_stop=stopping.include_stop,
            stop_texts=self.model.stop_texts(request) if stopping.include_stop else None,
            scores=job.scores if sample == 0 else None,
            sample=sample,
        )

    def _new_attempts(self, job: Job, guard: Guard, number: int, sample: int) -> Attempts:
        """The prompt's log-probabilities are told with the first sample only, over its replays too."""
        buffer_bytes = self._stream_buffer_bytes // job.request.n
        if sample > 0:
            job = replace(job, scores=PromptScores(None))
        return Attempts(
            job,
            SequenceKey(self._incarnation, number, sample, 0),
            self._dispatcher,
            lambda: Inbox(buffer_bytes, guard.too_slow, self._turns),
            max_attempts=self._max_attempts,
            wait_s=self._replay_wait_s,
        )


async def together(work: Sequence[Coroutine[None, None, None]]) -> None:
    """Runs all to their end, each in a task: one that wakes up for each token does so without passing through all that
    its request waits in. The first failure ends the others and is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(each) for each in work]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    for task in tasks:
        task.result()  # one that was cancelled alone: so is the call


def _log(job: Job, piece: Piece) -> None:
    finish = piece.finish
    if finish is not None:
        logger.info(
            "request %s, answer %d: %d prompt tokens (%d cached), %d output tokens, %s, prefill %s, decode %s, "
            "first token %.1f ms, total %.1f ms",
            job.request.request_id,
            piece.sample,
            finish.prompt_tokens,
            finish.cached_tokens,
            finish.output_tokens,
            finish.reason.name.lower(),
            finish.prefill_worker,
            finish.decode_worker,
            finish.timings.first_token * 1e3,
            finish.timings.total * 1e3,
        )
