"""Compiles constraints, and makes slow masks, beside the engine's thread."""

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection
from queue import SimpleQueue

from llguidance import LLMatcher, LLTokenizer

from ..errors import InvalidRequest
from .constraint_text import check_size
from .grammar import compile_grammar, in_deep_stack
from .matching import Matching
from .request import Constraint, SamplingParams

log = logging.getLogger(__name__)

THREADS = 2
KEPT = 32  # compiled constraints: of ordinary ones some 10 MiB each
WAIT_S = 0.1  # most that a step waits at once


class _Job:
    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        self.done = False

    def run(self) -> None:
        """Does not raise: the thread goes on."""
        try:
            self._work()
        except Exception as error:  # a fault of ours; its text may hold what a request says
            log.error("a job for a constraint failed: %s", type(error).__name__)
        self.done = True


class _Compiled:
    """Implements `matching.Compiled`."""

    def __init__(self, vocabulary: LLTokenizer, constraint: Constraint) -> None:
        self.done = False
        self.error = "it could not be compiled"
        self._vocabulary = vocabulary
        self._constraint = constraint
        self._matcher: LLMatcher | None = None

    def run(self) -> None:
        try:
            self._matcher, self.error = compile_grammar(self._vocabulary, self._constraint), ""
        except InvalidRequest as error:
            self.error = error.message
        except Exception as error:
            log.error("a constraint could not be compiled: %s", type(error).__name__)
        self.done = True

    def matcher(self) -> LLMatcher:
        if self._matcher is None:
            raise InvalidRequest(self.error, field="constraint")
        return self._matcher.deep_copy()


class Grammars:
    """Implements `matching.Background`, for the engine's thread. Its own threads start when first needed."""

    def __init__(self, vocabulary: LLTokenizer | str, vocab_size: int, end_ids: Collection[int]) -> None:
        """`vocabulary`: or why outputs of this model cannot be constrained."""
        self.wake: Callable[[], None] | None = None  # told, on another thread, that a job has ended
        self._vocabulary = vocabulary
        self._vocab_size = vocab_size
        self._end_ids = end_ids
        self._compiled: OrderedDict[Constraint, _Compiled] = OrderedDict()
        self._jobs: SimpleQueue[_Job | _Compiled] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._news = threading.Condition()
        self._ended = 0  # jobs; under the condition
        self._seen = 0  # of these, those that a wait was told of

    def matching(self, params: SamplingParams, tokens: list[int], start: int) -> Matching | None:
        """For a sequence with these parameters, see `Matching`; None where they name no constraint.

        InvalidRequest (field `constraint`) where outputs of this model cannot be constrained, or it is too long.
        """
        if params.constraint is None:
            return None
        if isinstance(self._vocabulary, str):
            raise InvalidRequest(f"outputs cannot be constrained: {self._vocabulary}", field="constraint")
        check_size(params.constraint)
        return Matching(params, params.constraint, tokens, start, self._vocab_size, self._end_ids, self)

    def wait(self) -> bool:
        """Waits a moment for a job's end, unless whoever drives the engine is woken by that anyhow. True: one ended."""
        if self.wake is not None:
            return False
        with self._news:
            self._news.wait_for(lambda: self._ended > self._seen, WAIT_S)
            ended = self._ended > self._seen
            self._seen = self._ended
        return ended

    def compile(self, constraint: Constraint) -> _Compiled:
        """As `Background.compile`."""
        compiled = self._compiled.get(constraint)
        if compiled is None:
            if isinstance(self._vocabulary, str):
                raise InvalidRequest(self._vocabulary, field="constraint")
            compiled = self._compiled[constraint] = _Compiled(self._vocabulary, constraint)
            if len(self._compiled) > KEPT:
                self._compiled.popitem(last=False)
            self._put(compiled)
        else:
            self._compiled.move_to_end(constraint)
        return compiled

    def run(self, work: Callable[[], None]) -> _Job:
        """As `Background.run`."""
        job = _Job(work)
        self._put(job)
        return job

    def _put(self, job: "_Job | _Compiled") -> None:
        while len(self._threads) < THREADS:
            self._threads.append(in_deep_stack(self._work, f"grammar-{len(self._threads)}"))
        self._jobs.put(job)

    def _work(self) -> None:
        while True:
            self._jobs.get().run()
            with self._news:
                self._ended += 1
                self._news.notify_all()
            if (wake := self.wake) is not None:
                wake()
