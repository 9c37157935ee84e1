"""The model runner on a GPU: launches steps one behind the other and never waits for the device itself."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ...errors import InvalidRequest
from ...kernels.gpu.page_copy import copy_pages
from ...kernels.gpu.prefill_attention import prefill_tiles
from ...kernels.gpu.state import set_table
from ..batch import Computed, Launched, LayerHook, Row
from ..config import EngineOptions
from ..model_config import ModelConfig
from ..request import SamplingParams, SequenceKey
from ..scoring import score
from ..weights import Weights
from .decoder import CudaDecoder, StepTensors
from .draw_columns import CONSTRAINED, DrawColumns, draws_of
from .draws import Allowed, Draws, Silent, Turn, Undrawn
from .graphs import DecodeGraphs
from .staging import ALIGNMENT, DEPTH, Staging
from .state import DeviceState

MAX_UPDATES = 1 << 14  # block table entries told to the device at once
CAPTURED_UPDATES = 512  # of these, such as a captured step has room for: two prompts of 16k, in pages of 64


@dataclass(frozen=True, slots=True)
class _Layout:
    """A step's rows in the order of computation: single tokens first."""

    rows: list[Row]
    slots: npt.NDArray[np.int32]
    singles: int
    updates: list[int]  # what the device has to know first


class CudaRunner:
    """Implements `core.Runner`. Also runs on a CPU under Triton's interpreter, without graphs, for tests."""

    overlaps = True

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        options: EngineOptions,
        pool: Tensor,
        graph_sizes: Sequence[int] = (),
    ) -> None:
        """`pool`: [layers, pages, 2, kv_heads, page_size, head_dim], contiguous, in the options' dtype and device."""
        self.weights = weights
        self._pool = pool
        self._device = pool.device
        self._options = options
        self._page_size = options.page_size
        self._invariant = options.batch_invariant
        max_pages = -(-config.context_length // options.page_size) + 1
        self._state = DeviceState(options.max_batch, max_pages, pool.device)
        self._decoder = CudaDecoder(config, weights, options, pool, self._state)
        self._asked = DrawColumns.zeros(self._state.slots)  # how each slot's tokens are drawn
        last_tokens = self._state.last_tokens
        self._draws = Draws(options.max_batch, config.vocab_size, config.eos_token_ids, last_tokens, pool.dtype)
        self._tile = self._decoder.prefill_shape.tokens
        budget = options.token_budget
        most = 16 * (budget + options.max_batch) + 3 * MAX_UPDATES + 64 * ALIGNMENT
        self._staging = Staging(most, pool.device)
        self._turn = 0  # of DEPTH: of the step last launched
        self._updates = Staging(3 * MAX_UPDATES, pool.device)
        self._stream: torch.cuda.Stream | None = None
        if pool.device.type == "cuda":
            self._stream = torch.cuda.Stream(pool.device)  # type: ignore[no-untyped-call]
        self.graphs = DecodeGraphs(graph_sizes if self._stream is not None else ())

    @torch.inference_mode()
    def launch(self, rows: list[Row], hook: LayerHook | None) -> Launched:
        """As `core.Runner.launch`."""
        with torch.cuda.stream(self._stream):  # none: nothing
            return self._launch(rows, hook)

    def _launch(self, rows: list[Row], hook: LayerHook | None) -> Launched:
        layout = self._arrange(rows)
        size = 0
        if layout.singles == len(rows) and hook is None and all(map(_decodes, rows)):
            size = self.graphs.size_for(len(rows))
        if size:
            step, positions = self._send_decode(layout, size)
            logits = self.graphs.replay(size)[: len(rows)]
            turn = Turn(self._turn, step.turn)
            return self._draw(rows, logits, step.slots[: len(rows)], layout.slots, positions, turn, size)
        drawing = [row for row in rows if row.sample]
        step, slots, own = self._send(layout, rows)
        progress = [row.progress for row in rows if row.progress is not None]
        written = None if hook is None or not progress else lambda layer: hook(layer, progress)
        normed = self._decoder.hidden(step, written)
        logits = self._decoder.head(normed[: len(drawing)]) if drawing else normed
        positions = np.array([row.start + len(row.token_ids) for row in drawing], np.int32)
        launched = self._draw(drawing, logits, slots, own, positions, Turn(self._turn, step.turn))
        if not (scorings := [row.scoring for row in rows if row.scoring is not None]):
            return launched

        def scored() -> Launched:  # after the draw: its logits take the place of those
            launched.draw()
            score(normed[len(drawing) :], self._decoder.head, scorings)
            return launched

        return Undrawn(self._later(scored)) if isinstance(launched, Undrawn) else scored()

    def _draw(
        self,
        drawing: list[Row],
        logits: Tensor,
        sent: Tensor,
        slots: npt.NDArray[np.int32],
        positions: npt.NDArray[np.int32],
        turn: Turn,
        size: int = 0,
    ) -> Launched:
        """`logits`: [len(drawing), vocab]; `sent`: int32, `slots` on the device: of each draw. `positions`: of the
        tokens to be drawn, by row. `size`: of the captured step; 0: it is none."""
        if not drawing:
            return Silent(self._stream.record_event() if self._stream is not None else None)
        if len(slots) > len(drawing):
            if any(row.matching is not None for row in drawing):
                return Undrawn(self._later(lambda: self._draw_samples(drawing, logits, sent, turn)))
            return self._draw_samples(drawing, logits, sent, turn)
        columns = self._asked.take(slots)
        if columns.kinds & CONSTRAINED:
            return Undrawn(self._later(lambda: self._draw_each(drawing, logits, sent, columns, positions, turn, size)))
        return self._draw_each(drawing, logits, sent, columns, positions, turn, size)

    def _draw_each(
        self,
        drawing: list[Row],
        logits: Tensor,
        sent: Tensor,
        columns: DrawColumns,
        positions: npt.NDArray[np.int32],
        turn: Turn,
        size: int,
    ) -> Launched:
        """As `_draw`, a token a row."""
        allowed: list[Allowed | None] = []
        if columns.kinds & CONSTRAINED:
            allowed = [None if row.matching is None else row.matching.allowed() for row in drawing]
        drawn = self._draws.draw(
            logits, columns, positions, sent, turn, lambda: draws_of(drawing), size=size, allowed=allowed
        )
        return Computed(drawn) if isinstance(drawn, list) else drawn

    def _later(self, finish: Callable[[], Launched]) -> Callable[[], Launched]:
        """`finish` for a later call of the same thread: what it launches follows the step's own."""

        @torch.inference_mode()
        def run() -> Launched:
            with torch.cuda.stream(self._stream):
                return finish()

        return run

    def _draw_samples(self, drawing: list[Row], logits: Tensor, sent: Tensor, turn: Turn) -> Launched:
        """As `_draw`, where a row draws several times: all samples of a prompt begin with the same logits.

        A prompt takes one place in a prefill worker's batch, and keeps drawing for samples that are cancelled: there
        may be more draws than the batch has places. Then they are drawn a batch at a time, and waited for.
        """
        draws = draws_of(drawing)
        sources = [i for i, row in enumerate(drawing) for _ in range(row.samples)]
        most, told = self._options.max_batch, []
        for start in range(0, len(draws), most):
            part = draws[start : start + most]
            own = logits[torch.tensor(sources[start : start + most], device=self._device)]
            positions = np.array([draw.position for draw in part], np.int32)
            columns = DrawColumns.of(part)
            drawn = self._draws.draw(
                own,
                columns,
                positions,
                sent[start : start + most],
                turn,
                lambda part=part: part,  # type: ignore[misc]
                wait=len(draws) > most,
                allowed=[draw.allowed for draw in part] if columns.kinds & CONSTRAINED else (),
            )
            if not isinstance(drawn, list):
                return drawn
            told += drawn
        return Computed(told)

    def _arrange(self, rows: list[Row]) -> _Layout:
        singles = sum([len(row.token_ids) == 1 for row in rows])
        ordered = rows if singles == len(rows) else sorted(rows, key=lambda row: len(row.token_ids) > 1)
        updates, fresh = list[int](), list[Row]()
        slots = self._state.place_all(ordered, updates, fresh)
        for row in fresh:
            self._asked.put(row.note.slot, row.params, row.key.sample)
        return _Layout(ordered, np.array(slots, np.int32), singles, updates)

    def _tell(self, updates: list[int], most: int) -> list[int]:
        """Those that the step takes along, at most so many entries; the device is told of the others before it."""
        while len(updates) > 3 * most:
            part, updates = updates[: 3 * MAX_UPDATES], updates[3 * MAX_UPDATES :]
            (sent,) = self._updates.send([part], [len(part)])
            set_table(self._state.tables, self._state.last_tokens, sent.view(-1, 3))
        return updates

    def _next_turn(self) -> list[int]:
        self._turn = (self._turn + 1) % DEPTH
        return [self._turn]

    def _send_decode(self, layout: _Layout, size: int) -> tuple[StepTensors, npt.NDArray[np.int32]]:
        """Rows of one token each, padded to `size`, and the positions of their draws."""
        positions = np.array([row.start for row in layout.rows], np.int32)
        updates = self._tell(layout.updates, CAPTURED_UPDATES)
        tokens = [row.token_ids[0] for row in layout.rows]
        return self._decode_tensors(tokens, layout.slots, positions, updates, size), positions + 1

    def _decode_tensors(
        self,
        tokens: list[int],
        slots: npt.NDArray[np.int32],
        positions: npt.NDArray[np.int32],
        updates: list[int],
        size: int,
    ) -> StepTensors:
        """A decode step, padded to `size`: tensors whose place depends on `size` only."""
        tiles = np.empty(0, np.int32)
        if self._invariant:  # attended by the kernel that prompts are attended by: as it would be in a prompt
            rows = np.arange(len(tokens))
            tiles = np.stack([slots, rows, np.ones_like(rows), positions], axis=1).astype(np.int32).ravel()
        sizes = [size, size, size, 4 * size if self._invariant else 0, 3 * CAPTURED_UPDATES, 1]
        sent = self._staging.send([tokens, slots, positions, tiles, updates, self._next_turn()], sizes)
        tiled, singles = sent[3].view(-1, 4), 0 if self._invariant else size
        return StepTensors(sent[0], sent[1], sent[2], sent[4].view(-1, 3), sent[5], singles, tiled, tiled)

    def _send(self, layout: _Layout, rows: list[Row]) -> tuple[StepTensors, Tensor, npt.NDArray[np.int32]]:
        """The step, and the slots of its draws, there and here."""
        counts = np.array([len(row.token_ids) for row in layout.rows])
        firsts = np.cumsum(counts) - counts
        starts = np.array([row.start for row in layout.rows])
        tokens = np.fromiter(chain.from_iterable(row.token_ids for row in layout.rows), np.int32, counts.sum())
        slots = np.repeat(layout.slots, counts)
        positions = (np.arange(len(tokens)) + np.repeat(starts - firsts, counts)).astype(np.int32)
        slot_of = {id(row): slot for row, slot in zip(layout.rows, layout.slots.tolist(), strict=True)}
        first_of = {id(row): first for row, first in zip(layout.rows, firsts.tolist(), strict=True)}
        described = zip(slot_of.values(), firsts.tolist(), counts.tolist(), starts.tolist(), strict=True)
        spans = [span for span in described if span[2] > 1 or self._invariant]
        tiles = [number for tile in prefill_tiles(spans, self._tile) for number in tile]
        picked = [first_of[id(row)] + len(row.token_ids) - 1 for row in rows if row.sample]
        scored = _scored(first_of, rows)
        last = (
            [] if scored else [(slots[i], i, 1, positions[i]) for i in picked if i >= layout.singles or self._invariant]
        )
        picked += scored
        # Samples of one prompt have no slots of their own yet: slot 0 is nobody's.
        draws = [slot_of[id(row)] if row.samples == 1 else 0 for row in rows if row.sample for _ in range(row.samples)]
        own = np.array(draws, np.int32)
        last_tiles = tiles if scored else [int(number) for tile in last for number in tile]
        updates = self._tell(layout.updates, MAX_UPDATES)
        parts = [tokens, slots, positions, tiles, picked, own, last_tiles, updates, self._next_turn()]
        sent = self._staging.send(parts, [len(part) for part in parts])
        singles = 0 if self._invariant else layout.singles
        cut = sent[3].view(-1, 4), sent[6].view(-1, 4)
        step = StepTensors(sent[0], sent[1], sent[2], sent[7].view(-1, 3), sent[8], singles, *cut, sent[4])
        return step, sent[5], own

    @torch.inference_mode()
    def capture(self, told: Callable[[int, int], None] | None = None) -> None:
        """Captures the decode graphs; everything must be compiled already. `told`: as in `DecodeGraphs.capture`."""
        if self._stream is not None:
            with torch.cuda.stream(self._stream):
                self.graphs.capture(self._padding_step, told)
                self._capture_draws()

    def _capture_draws(self) -> None:
        """As `capture`, of how the tokens of captured steps are drawn."""
        for size in self.graphs.sizes:
            step = self._padding(size)
            self._draws.capture(size, self.graphs.logits(size), step.slots, step.turn)

    @torch.inference_mode()
    def rehearse(self) -> None:
        """Goes the way of the smallest captured step, less its layers: host and driver know it still
        when a step comes after a pause. Nobody hears of what is drawn. Only while no step is on its way.
        """
        if self.graphs.sizes:
            with torch.cuda.stream(self._stream):
                size = self.graphs.sizes[0]
                step = self._padding(size)
                rows, positions = DrawColumns.zeros(size), np.zeros(size, np.int32)
                turn = Turn(self._turn, step.turn)
                self._draws.draw(self.graphs.logits(size), rows, positions, step.slots, turn, tuple, size=size)

    def _padding(self, size: int) -> StepTensors:
        """A step of `size` padding rows."""
        return self._decode_tensors([], np.empty(0, np.int32), np.empty(0, np.int32), [], size)

    def _padding_step(self, size: int) -> Callable[[], Tensor]:
        """What launches it."""
        step = self._padding(size)
        return lambda: self._decoder.head(self._decoder.hidden(step))

    @torch.inference_mode()
    def copy_pages(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copies whole pages of all layers: targets[i] gets the content of sources[i]."""
        with torch.cuda.stream(self._stream):
            pairs = [number for pair in zip(sources, targets, strict=True) for number in pair]
            for start in range(0, len(pairs), 2 * MAX_UPDATES):
                part = pairs[start : start + 2 * MAX_UPDATES]
                (sent,) = self._updates.send([part], [len(part)])
                copy_pages(self._pool, sent.view(-1, 2))

    @torch.inference_mode()
    def trace(self, token_ids: Sequence[int], observe: Callable[[Tensor], None]) -> Tensor:
        """One prompt alone, for checks: the logits of all its tokens, [tokens, vocab].

        `observe`: as in `CudaDecoder.hidden`. Writes over the first pages of the pool: only where no sequence runs.
        """
        if len(token_ids) > self._options.token_budget:
            most = self._options.token_budget
            raise InvalidRequest(f"{len(token_ids)} tokens to trace, at most {most} (token_budget)", field="prompt")
        pages = list(range(1, 2 + len(token_ids) // self._page_size))
        row = Row(SequenceKey(0, 0, 0, 0), list(token_ids), 0, pages, SamplingParams(), False)
        with torch.cuda.stream(self._stream):
            step = self._send(self._arrange([row]), [row])[0]
            step = replace(step, picked=None, last_tiles=step.tiles)
            normed = self._decoder.hidden(step, observe=observe)
            most = self._options.max_batch
            parts = [self._decoder.head(normed[i : i + most]).clone() for i in range(0, len(token_ids), most)]
            logits = torch.cat(parts)
        if self._stream is not None:  # the caller goes on on its own
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
        return logits


def _decodes(row: Row) -> bool:
    """Whether a row of one token does what those of a captured step do: draws one token, and nothing else."""
    return row.sample and row.samples == 1 and row.scoring is None


def _scored(first_of: dict[int, int], rows: list[Row]) -> list[int]:
    """Places, in the step's tokens, of those whose successors' log-probabilities are wanted; in the order of `rows`.

    `first_of`: by id of a row, the place of its first token.
    """
    return [
        first_of[id(row)] - row.start + position - 1
        for row in rows
        if (scoring := row.scoring) is not None
        for position in range(scoring.first, scoring.first + len(scoring.targets))
    ]
