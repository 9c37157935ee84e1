"""The attempts of one request: when a worker dies, hangs or drains away, the next one goes on where the last one was.

A replay is an ordinary request that carries what the client already has; noise is keyed by seed and position, so it
goes on as the lost attempt would have (exactly in fp32). Whatever still comes of an older attempt is dropped.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from ...engine.request import FinishReason, SequenceKey, Token
from ...errors import TwostrokeError, Unavailable
from .answer import WorkerReport
from .dispatch import Dispatcher, Job
from .flight import Flight, Lost
from .inbox import Inbox
from .worker_session import RETRY_S

logger = logging.getLogger(__name__)


class Attempts:
    """`start` launches the first; `take` gives the tokens, over all attempts; `close` drops whatever still runs."""

    def __init__(
        self,
        job: Job,
        key: SequenceKey,
        dispatcher: Dispatcher,
        inbox: Callable[[], Inbox],
        *,
        max_attempts: int,
        wait_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`key`: of attempt 0. `inbox` makes the queue of an attempt. `wait_s`: the longest that a request which has
        lost its workers waits for others to come."""
        self._job = job
        self._key = key
        self._dispatcher = dispatcher
        self._inbox = inbox
        self._max_attempts = max_attempts
        self._wait_s = wait_s
        self._clock = clock
        self._tokens: list[int] = []
        self._avoid: set[int] = set()
        self._counted = 1  # attempts that count: all but those that met a draining worker
        self._waited_since: float | None = None  # without a token
        self._report = WorkerReport()
        self._flight = self._new_flight()

    @property
    def finish(self) -> FinishReason | None:
        """Why the output ended, once `take` gave all of it."""
        return self._flight.finish

    @property
    def replays(self) -> int:
        """How often it began anew."""
        return self._key.attempt

    def start(self, siblings: Sequence["Attempts"] = ()) -> None:
        """Launches the first attempt, for further samples of the prompt too: it is computed and handed over once.

        From there on each sample is replayed by itself. Unavailable where nobody can take it: a client that has nothing
        yet can wait.
        """
        flights = [self._flight, *(sibling._flight for sibling in siblings)]
        try:
            self._dispatcher.launch(self._flight, self._job, [], self._avoid, siblings=flights[1:])
        except Unavailable as error:
            if not self._flight.launched:
                raise
            for flight in flights:
                flight.lose(error)  # a session ended just now

    async def take(self) -> list[Token]:
        """The next tokens, in order, each once; may be empty. Raises what ends the request."""
        while True:
            try:
                await self._flight.arrival()
                tokens = self._flight.take()
            except Lost as lost:
                await self._again(lost)
                continue
            if tokens:
                self._tokens += [token.token_id for token in tokens]
                self._waited_since = None
            return tokens

    def report(self) -> WorkerReport:
        """What the workers measured so far: times of those who measured first, names of the last ones."""
        return replace(merged(self._report, self._flight.report()), replays=self._key.attempt)

    def close(self) -> None:
        """Cancels at once what still runs at the workers. Idempotent."""
        self._flight.close()

    def _new_flight(self) -> Flight:
        job = self._job
        return Flight(self._key, self._inbox(), job.params.max_tokens, first_index=len(self._tokens), scores=job.scores)

    async def _again(self, lost: Lost) -> None:
        """Launches the next attempt, waiting for a worker where none is left. Raises where that does not help."""
        if self._waited_since is None:
            self._waited_since = self._clock()
        while True:
            self._flight.close()
            self._report = merged(self._report, self._flight.report())
            self._avoid |= lost.workers
            self._charge(lost)
            logger.info(
                "request %s is replayed after %d tokens: %s",
                self._job.request.request_id,
                len(self._tokens),
                lost.error.message,
            )
            self._key = self._key._replace(attempt=self._key.attempt + 1)
            self._flight = self._new_flight()
            try:
                await self._launch(lost.error)
                return
            except Lost as again:
                lost = again

    def _charge(self, lost: Lost) -> None:
        """Raises where another attempt is not granted."""
        if lost.counted:
            if self._counted >= self._max_attempts:
                raise self._exhausted(lost.error) from lost
            self._counted += 1
        elif self._left() <= 0:
            raise lost.error from lost

    def _left(self) -> float:
        """Seconds that it may still wait; the count begins anew with each token."""
        since = self._clock() if self._waited_since is None else self._waited_since
        return since + self._wait_s - self._clock()

    async def _launch(self, cause: TwostrokeError) -> None:
        """Lost where a session ended just now; Unavailable where nobody came in time."""
        while True:
            try:
                self._dispatcher.launch(self._flight, self._job, self._tokens, self._avoid)
                return
            except Unavailable as error:
                if self._flight.launched:
                    raise Lost(error) from error
                if (left := self._left()) <= 0:
                    raise Unavailable(f"{cause.message}; {error.message}", retry_after_s=RETRY_S) from error
            try:
                async with asyncio.timeout(left):
                    await self._dispatcher.fleet.change()
            except TimeoutError:
                pass

    def _exhausted(self, error: TwostrokeError) -> TwostrokeError:
        text = f"{error.message} (attempt {self._counted} of {self._max_attempts})"
        if type(error) is TwostrokeError:  # a fault of the workers' own
            return TwostrokeError(text)
        return Unavailable(text, retry_after_s=RETRY_S)


def merged(first: WorkerReport, later: WorkerReport) -> WorkerReport:
    """Where the first attempt says nothing, or for names, the later one counts."""
    if not first.prefill_worker:
        return later
    computed = bool(first.prefill or first.queue)
    return replace(
        later,
        queue=first.queue if computed else later.queue,
        prefill=first.prefill if computed else later.prefill,
        cached_tokens=first.cached_tokens if computed else later.cached_tokens,
        transfer=first.transfer or later.transfer,
    )
