"""The model runner: a step's rows to tensors, through the decoder and the sampler, to tokens."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..kernels.attention_plan import PoolShape, Span, plan_attention
from ..kernels.kv_write import kv_rows
from ..kernels.rope import rope_angles
from .batch import Computed, LayerHook, Row
from .config import EngineOptions
from .decoder import Decoder, KindInputs, StepInputs
from .model_config import ModelConfig
from .request import SamplingParams, SequenceKey, Token
from .rope_scaling import frequencies
from .sampler import Draw, sample
from .scoring import score
from .weights import Weights


class ModelRunner:
    """Implements `core.Runner` with a real model."""

    def __init__(self, config: ModelConfig, weights: Weights, options: EngineOptions, pool: Tensor) -> None:
        """`pool`: [layers, pages, 2, kv_heads, page_size, head_dim], contiguous, in the options' dtype and device."""
        self.weights = weights
        self._decoder = Decoder(config, weights, pool)
        self._pool = pool
        self._shape = PoolShape(config.kv_heads, options.page_size, config.head_dim)
        self._device = pool.device
        self._end_ids = config.eos_token_ids
        self._kinds = config.kinds
        self._frequencies = {kind.rope: frequencies(kind.rope, pool.device) for kind in self._kinds}

    overlaps = False

    def launch(self, rows: list[Row], hook: LayerHook | None) -> Computed:
        """As `core.Runner.launch`: computes the step."""
        return Computed(self.run(rows, hook))

    @torch.inference_mode()
    def run(self, rows: list[Row], hook: LayerHook | None) -> list[Token]:
        """Compute a step. Returns the tokens of each row with `sample`, in row order; fills in the rows' `scoring`."""
        if not rows:
            return []
        spans = _spans(rows)
        step = self._inputs(rows, spans)
        progress = [row.progress for row in rows if row.progress is not None]
        written = None if hook is None or not progress else lambda layer: hook(layer, progress)
        hidden = self._decoder.hidden(step, written)
        drawing = [row for row in rows if row.sample]
        draws = [
            Draw(
                row.params,
                row.key.sample + index,
                row.start + len(row.token_ids),
                row.rules,
                None if row.matching is None else row.matching.allowed(),
            )
            for row in drawing
            for index in range(row.samples)
        ]
        logits = self._decoder.head(hidden[: len(drawing)])
        if len(draws) > len(drawing):  # all samples of a prompt begin with the same logits
            logits = logits.repeat_interleave(self._tensor([row.samples for row in drawing]), dim=0)
        tokens = sample(logits, draws, self._end_ids)
        scorings = [row.scoring for row in rows if row.scoring is not None]
        if scorings:
            score(hidden[len(drawing) :], self._decoder.head, scorings)
        return tokens

    def rehearse(self) -> None:
        """As `CudaRunner.rehearse`; nothing, for a step here is computed, not launched."""

    @torch.inference_mode()
    def copy_pages(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copies whole pages of all layers: targets[i] gets the content of sources[i]."""
        self._pool[:, self._tensor(targets)] = self._pool[:, self._tensor(sources)]

    @torch.inference_mode()
    def trace(self, token_ids: Sequence[int], observe: Callable[[Tensor], None]) -> Tensor:
        """One prompt alone, for checks: the logits of all its tokens, [tokens, vocab].

        `observe`: as in `Decoder.hidden`. Writes over the first pages of the pool: only where no sequence runs.
        """
        pages = list(range(1, 2 + len(token_ids) // self._shape.page_size))
        row = Row(SequenceKey(0, 0, 0, 0), list(token_ids), 0, pages, SamplingParams(), False)
        step = replace(self._inputs([row], _spans([row])), sampled=self._tensor(range(len(token_ids))))
        return self._decoder.head(self._decoder.hidden(step, observe=observe))

    def _inputs(self, rows: list[Row], spans: list[tuple[Row, Span]]) -> StepInputs:
        size = self._shape.page_size
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        for row, span in spans:
            tokens += row.token_ids
            reach = range(span.start, span.start + span.count)
            positions += reach
            slots += [span.pages[p // size] * size + p % size for p in reach]
        last = {id(row): span.first + span.count - 1 for row, span in spans}
        sampled = [last[id(row)] for row in rows if row.sample]
        sampled += _scored(spans, rows)
        return StepInputs(
            token_ids=self._tensor(tokens),
            kv_rows=kv_rows(self._tensor(slots), self._shape.kv_heads, size),
            by_kind=self._by_kind([span for _, span in spans], self._tensor(positions)),
            sampled=self._tensor(sampled),
        )

    def _by_kind(self, spans: list[Span], positions: Tensor) -> list[KindInputs]:
        """`positions`: int64 [tokens]."""
        longest = max(span.start + span.count for span in spans)
        angles = {
            rope: rope_angles(positions, table, rope.attention_factor) for rope, table in self._frequencies.items()
        }
        # A window that nobody has outgrown is none.
        windows = [kind.window if kind.window < longest else 0 for kind in self._kinds]
        plans = {window: plan_attention(spans, self._shape, self._device, window) for window in set(windows)}
        return [
            KindInputs(*angles[kind.rope], plans[window]) for kind, window in zip(self._kinds, windows, strict=True)
        ]

    def _tensor(self, numbers: Sequence[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int64, device=self._device)


def _scored(spans: list[tuple[Row, Span]], rows: list[Row]) -> list[int]:
    """Places, in the step's tokens, of those whose successors' log-probabilities are wanted; in the order of `rows`."""
    first = {id(row): span.first - row.start for row, span in spans}
    return [
        first[id(row)] + position - 1
        for row in rows
        if (scoring := row.scoring) is not None
        for position in range(scoring.first, scoring.first + len(scoring.targets))
    ]


def _spans(rows: list[Row]) -> list[tuple[Row, Span]]:
    """The rows in the order of computation: single tokens first, longest first, so that like lengths stand together."""
    ordered = sorted(rows, key=lambda row: (len(row.token_ids) > 1, -row.start))
    spans = []
    first = 0
    for row in ordered:
        spans.append((row, Span(first, len(row.token_ids), row.start, row.pages)))
        first += len(row.token_ids)
    return spans
