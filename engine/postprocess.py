"""What follows a step: its KV counts as written, its tokens go into their sequences, some of which end."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from ..errors import TwostrokeError
from .batch import Failed, Launched, Runner, Scoring
from .output_length import OutputLength
from .request import (
    NO_TOKEN,
    FinishReason,
    SequenceKey,
    SequenceOutput,
    SequenceTimings,
    StepResult,
    Token,
    Work,
    sample_keys,
)
from .roster import Roster
from .scheduler import Schedule
from .sequence import Sequence
from .validate import cannot_go_on, nothing_left


@dataclass(frozen=True, slots=True)
class Flight:
    """A launched step."""

    plan: Schedule
    stays: list[int]  # of each sequence, when it was launched
    step: Launched
    began: float = 0.0  # when it was launched

    @property
    def failed(self) -> bool:
        """Whether it could not even be launched."""
        return isinstance(self.step, Failed)

    def current(self) -> list[Sequence]:
        """Its sequences, less those that have ended or lost their pages since."""
        return [s for s, stay in zip(self.plan.sequences, self.stays, strict=True) if s.stay == stay]


class Postprocessor:
    """Takes what was computed, here or by a prefill worker, into the sequences; parts the samples of a prompt."""

    def __init__(
        self,
        roster: Roster,
        runner: Runner,
        output_length: OutputLength,
        *,
        clock: Callable[[], float],
    ) -> None:
        """`runner`: copies pages. `output_length`: learns of every end."""
        self.prefilled_tokens = 0  # of prompts, and of output computed anew; since the start
        self._roster = roster
        self._runner = runner
        self._output_length = output_length
        self._clock = clock

    def launched(self, plan: Schedule, step: Launched, began: float) -> Flight:
        """The step is on its way: its rows count as launched. `began`: when its launch did."""
        decoding = plan.decoding
        for sequence in plan.sequences[:decoding]:
            sequence.launched += 1
            sequence.unseen += 1
        for row, sequence in zip(plan.rows[decoding:], plan.sequences[decoding:], strict=True):
            sequence.launched += len(row.token_ids)
            sequence.unseen += row.sample
        return Flight(plan, [sequence.stay for sequence in plan.sequences], step, began)

    def fail(self, sequences: Iterable[Sequence], error: Exception, result: StepResult) -> None:
        """Their step was not computed: they end."""
        for sequence in sequences:
            result.failures += [(key, error) for key in self._roster.drop(sequence)]

    def advance(self, flight: Flight, tokens: list[Token], result: StepResult) -> None:
        """Takes the step's KV for written and its tokens for the sequences' next ones.

        What concerns a sequence that has ended or lost its pages since the launch is void.
        """
        plan, decoding = flight.plan, flight.plan.decoding
        self._advance_decoding(plan.sequences[:decoding], flight.stays, tokens, result)
        drawn = iter(tokens[decoding:])
        for row, sequence, stay in zip(
            plan.rows[decoding:], plan.sequences[decoding:], flight.stays[decoding:], strict=True
        ):
            own = [next(drawn) for _ in range(row.samples)] if row.sample else []
            if sequence.stay != stay:
                continue
            self.prefilled_tokens += len(row.token_ids)
            sequence.computed += len(row.token_ids)
            sequence.unseen -= row.sample
            done = sequence.prefill_only and sequence.computed == len(sequence.tokens)
            if not done:  # else behind the hand-over, for which a client waits
                self._roster.publish(sequence)
            if row.scoring is not None:
                result.outputs.append(self._scored(sequence, row.scoring))
            if row.sample:
                if own[0].token_id == NO_TOKEN:  # then no sample of the prompt has any
                    self._fail_drawing(sequence, result)
                    continue
                self._take(sequence, own, result)
            if done:
                result.prefilled.append(sequence.key)
                self._end_prefill(sequence)

    def _advance_decoding(
        self, sequences: list[Sequence], stays: list[int], tokens: list[Token], result: StepResult
    ) -> None:
        """`advance` for rows that decode: there may be hundreds in each step, so little is asked of each."""
        page_size, outputs = self._roster.page_size, result.outputs
        for sequence, stay, token in zip(sequences, stays, tokens, strict=False):
            if sequence.stay != stay:
                continue
            sequence.unseen -= 1
            sequence.computed += 1
            if sequence.computed % page_size == 0:
                self._roster.publish(sequence)
            token_id, known = token[0], sequence.tokens
            if token_id in sequence.ends or token_id == NO_TOKEN or len(known) + 1 >= sequence.limit:
                self._end_decoding(sequence, token, result)
                continue
            outputs.append(
                SequenceOutput(sequence.key, len(known) - len(sequence.request.prompt_ids), [token], None, None)
            )
            known.append(token_id)

    def _end_decoding(self, sequence: Sequence, token: Token, result: StepResult) -> None:
        if token.token_id == NO_TOKEN:
            self._fail_drawing(sequence, result)
        else:
            result.outputs.append(self._append(sequence, token, None))

    def _fail_drawing(self, sequence: Sequence, result: StepResult) -> None:
        """Its rules left no token to draw."""
        error = nothing_left(sequence.next_index())
        if sequence.matching is not None and sequence.matching.error:
            error = cannot_go_on(sequence.next_index(), sequence.matching.error)
        result.failures += [(key, error) for key in self._roster.drop(sequence)]

    def arrive(
        self,
        sequence: Sequence,
        firsts: Mapping[SequenceKey, tuple[Token, FinishReason | None]],
        measured: SequenceTimings | None = None,
    ) -> list[SequenceOutput]:
        """DECODE: its KV is whole; `firsts`: token 0 of each sample; `measured`: by the prefill worker.

        TwostrokeError, and no change, if a copy fails.
        """
        self._copy_last_page(sequence)
        self._roster.arrive(sequence)
        if measured is not None:
            sequence.timings = replace(measured)
        if sequence.began is not None:
            sequence.timings.transfer = self._clock() - sequence.began
        return [self._append(parted, *firsts[parted.key]) for parted in self._roster.part(sequence)]

    def _scored(self, sequence: Sequence, scoring: Scoring) -> SequenceOutput:
        sequence.scored = scoring.first + len(scoring.targets)
        return SequenceOutput(sequence.key, sequence.next_index(), [], None, None, scoring.result)

    def _take(self, sequence: Sequence, tokens: list[Token], result: StepResult) -> None:
        """New tokens of a sequence; after a prompt with several samples, token 0 of each.

        A PREFILL sequence tells those of cancelled samples too: the decode worker may not have heard of that.
        """
        if sequence.samples == 1:
            result.outputs.append(self._append(sequence, tokens[0], None))
            return
        firsts = dict(zip(sample_keys(sequence.key, len(tokens)), tokens, strict=True))
        if sequence.prefill_only:
            result.outputs += [self._append(sequence, token, None, key) for key, token in firsts.items()]
            return
        try:
            self._copy_last_page(sequence)
        except TwostrokeError as error:
            result.failures += [(key, error) for key in self._roster.drop(sequence)]
            return
        result.outputs += [self._append(parted, firsts[parted.key], None) for parted in self._roster.part(sequence)]

    def _copy_last_page(self, sequence: Sequence) -> None:
        """Gives each sibling its own copy of the prompt's last, unfilled page, where there is one."""
        full, rest = divmod(sequence.base, self._roster.page_size)
        targets = [private[0] for private in sequence.siblings.values() if private and rest]
        if not targets:
            return
        try:
            self._runner.copy_pages([sequence.pages[full]] * len(targets), targets)
        except Exception as error:
            raise TwostrokeError(f"a page could not be copied: {error}") from error

    def _end_prefill(self, sequence: Sequence) -> None:
        if sequence.released:
            self._roster.drop(sequence)
        else:
            self._roster.park(sequence)

    def _append(
        self, sequence: Sequence, token: Token, finish: FinishReason | None, key: SequenceKey | None = None
    ) -> SequenceOutput:
        """Adds a new token; drops the sequence if that was its last (a PREFILL one stays until `release`).

        `key`: of the sample, where it is not the sequence's own.
        """
        index = sequence.next_index()
        finish = finish or self._finish(sequence, token.token_id)
        first = len(sequence.tokens) == sequence.base
        computed = first and not sequence.reported and sequence.request.work is not Work.DECODE
        if computed and sequence.began is not None:
            sequence.timings.prefill = self._clock() - sequence.began
        timings = replace(sequence.timings) if first or finish else None
        if sequence.prefill_only:
            sequence.reported = True
        else:
            sequence.tokens.append(token.token_id)
            if finish:
                self._output_length.observe(index + 1)
                self._roster.drop(sequence)
        return SequenceOutput(key or sequence.key, index, [token], finish, timings)

    def _finish(self, sequence: Sequence, token_id: int) -> FinishReason | None:
        if token_id in sequence.ends:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(sequence.tokens) + 1 >= sequence.limit else None
