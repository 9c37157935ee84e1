"""What a sequence's constraint allows as its next token, kept in step with its tokens."""

import logging
import time
from collections.abc import Callable, Collection, Iterable
from typing import Protocol

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher

from .grammar import problem
from .request import Constraint, SamplingParams

log = logging.getLogger(__name__)

SLOW_S = 0.003  # of computing: a mask that takes longer is made in the background from then on
CAREFUL = 32  # masks, after a slow one, that are made in the background
MOST_INLINE = 8  # tokens that are taken in between two steps; more, those of a replay, in the background


class Job(Protocol):
    """Work in the background."""

    @property
    def done(self) -> bool:
        """Whether it has ended."""
        ...


class Compiled(Job, Protocol):
    """A grammar, once `done`."""

    @property
    def error(self) -> str:
        """Why it cannot be used; empty: it can."""
        ...

    def matcher(self) -> LLMatcher:
        """A new one, at the output's beginning."""
        ...


class Background(Protocol):
    """Where grammars are compiled and slow masks are made."""

    def compile(self, constraint: Constraint) -> Compiled:
        """Begins to compile it, unless that was done before; wakes the engine at the end."""
        ...

    def run(self, work: Callable[[], None]) -> Job:
        """Runs `work` on another thread, and wakes the engine at its end."""
        ...


class Matching:
    """The engine's thread owns it, except while a job of its own is on its way: then nothing but `ready` may be called.

    Derived from the output's tokens alone, so that it is right after a replay or a preemption.
    """

    def __init__(
        self,
        params: SamplingParams,
        constraint: Constraint,
        tokens: list[int],
        start: int,
        vocab_size: int,
        end_ids: Collection[int],
        background: Background,
    ) -> None:
        """`constraint`: that of `params`. `tokens`: the sequence's own list, from `start` on the output."""
        self.error = ""  # why nothing can be drawn any more
        self._params = params
        self._constraint = constraint
        self._tokens = tokens
        self._start = start
        self._vocab_size = vocab_size
        self._end_ids = end_ids
        self._background = background
        self._eos, self._stops = _bits(end_ids, vocab_size), _bits({*end_ids, *params.stop_token_ids}, vocab_size)
        self._compiled = background.compile(constraint)
        self._matcher: LLMatcher | None = None
        self._taken = start  # tokens that the matcher knows
        self._mask = np.zeros(-(-vocab_size // 32), np.int32)
        self._masked = -1  # number of tokens that the mask is for
        self._careful = 0
        self._job: Job | None = None

    def twin(self, tokens: list[int]) -> "Matching":
        """Of another sample, with these tokens."""
        return Matching(
            self._params, self._constraint, tokens, self._start, self._vocab_size, self._end_ids, self._background
        )

    def ready(self, unseen: int) -> bool:
        """Whether its sequence's next token can be drawn: at the latest when the `unseen` ones are known, without much
        ado. False: not before the engine was woken, or a step has been taken in.
        """
        if self._job is not None:
            if not self._job.done:
                return False
            self._job = None
        if self._matcher is None and not self.error:
            if not self._compiled.done:
                return False
            if self._compiled.error:
                self._end(self._compiled.error)
                return True
            self._matcher = self._compiled.matcher()
        if self.error or not (self._careful or len(self._tokens) - self._taken > MOST_INLINE):
            return True
        if unseen or self._masked == len(self._tokens):
            return not unseen
        self._job = self._background.run(self._make)
        return False

    def allowed(self) -> npt.NDArray[np.int32]:
        """[ceil(vocab / 32)]: bit i % 32 of word i // 32 is 1 where token i may come next; no bit where it cannot go on
        (`error` says why). Only where `ready` said so. Valid until the next call.
        """
        if self._masked != len(self._tokens):
            self._make()
        return self._mask

    def _make(self) -> None:
        """The mask for the token after the last one. Does not raise: it would cost a whole step."""
        began, first = time.thread_time(), self._masked < 0
        try:
            self._advance()
        except Exception as error:  # a fault of ours; its text may hold what a request says
            log.error("a constraint could not be followed: %s", type(error).__name__)
            self._end("the constraint cannot be followed, by a fault of ours")
        self._masked = len(self._tokens)
        slow = time.thread_time() - began > SLOW_S and not first  # what a matcher does first takes longer
        self._careful = CAREFUL if slow else max(0, self._careful - 1)

    def _advance(self) -> None:
        matcher = self._matcher
        if matcher is None or self.error:
            self._end(self.error or "the constraint was not compiled")
            return
        new = self._tokens[self._taken :]
        self._taken += len(new)
        if not new or matcher.consume_tokens(new):
            matcher.unsafe_compute_mask_ptr(self._mask.ctypes.data, self._mask.nbytes)
        if (reason := problem(matcher)) is not None:
            self._end(f"the constraint cannot be followed: {reason}")
            return
        self._hold_back()

    def _hold_back(self) -> None:
        """Ends that are not wanted yet go where there is something else."""
        if len(self._tokens) - self._start < self._params.min_tokens:
            later = self._stops
        elif self._params.ignore_eos:
            later = self._eos
        else:
            return
        kept = self._mask & ~later
        if kept.any():
            self._mask[:] = kept

    def _end(self, reason: str) -> None:
        self.error = reason
        self._mask.fill(0)


def _bits(ids: Iterable[int], vocab_size: int) -> npt.NDArray[np.int32]:
    words = np.zeros(-(-vocab_size // 32), np.uint32)
    for token in ids:
        words[token // 32] |= np.uint32(1 << token % 32)
    return words.view(np.int32)
