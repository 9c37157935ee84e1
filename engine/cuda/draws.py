"""Drawing a step's tokens on the device, and bringing them to the host without holding up the next step."""

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ...kernels.gpu.draw import DrawParams, DrawScratch, draw, draw_greedy
from ...kernels.gpu.logprobs import logprobs
from ...kernels.gpu.mask import mask_logits
from ...kernels.gpu.state import keep_tokens
from ..batch import Launched
from ..request import NO_TOKEN, Token, plain_tokens
from ..sampler import Draw, sample
from .draw_columns import DRAWN, MAX_TOP, PLAIN, TOLD, DrawColumns
from .graphs import DrawGraphs
from .staging import ALIGNMENT, DEPTH, Staging, new_event

Allowed: TypeAlias = npt.NDArray[np.int32]  # as `Matching.allowed`


@dataclass(frozen=True, slots=True)
class Turn:
    """Which part of the host's memory a step's tokens come to: 0 .. DEPTH - 1, in the order of the steps."""

    number: int
    sent: Tensor  # int32 [1]: the same on the device


class Silent:
    """A step on its way that draws nothing. Implements `batch.Launched`."""

    def __init__(self, event: "torch.cuda.Event | None") -> None:
        self.waited_s = 0.0  # how long the host waited for the device
        self.event = event

    def tokens(self) -> list[Token]:
        """Waits until the step is computed."""
        if self.event is not None:
            began = time.perf_counter()
            self.event.synchronize()
            self.waited_s = time.perf_counter() - began
        return []

    def draw(self) -> None:
        """All is drawn already."""


class Undrawn:
    """A step on its way whose tokens are drawn when `draw` is called. Implements `batch.Launched`."""

    def __init__(self, finish: Callable[[], Launched]) -> None:
        """`finish`: launches what draws them."""
        self._finish = finish
        self._drawn: Launched | None = None

    @property
    def event(self) -> "torch.cuda.Event | None":
        """When it is computed; None before `draw`, and where the host has waited."""
        return getattr(self._drawn, "event", None)

    @property
    def waited_s(self) -> float:
        """How long the host waited for the device."""
        return float(getattr(self._drawn, "waited_s", 0.0))

    def draw(self) -> None:
        """As `Launched.draw`."""
        if self._drawn is None:
            self._drawn = self._finish()

    def tokens(self) -> list[Token]:
        """As `Launched.tokens`."""
        self.draw()
        return [] if self._drawn is None else self._drawn.tokens()


class DrawnStep(Silent):
    """Tokens on their way to the host."""

    def __init__(self, event: "torch.cuda.Event | None", count: int, host: "_Host", tops: Sequence[int]) -> None:
        """`tops`: log-probabilities wanted of each token, -1: none; empty where no token's are."""
        super().__init__(event)
        self._count = count
        self._host = host
        self._tops = tops

    def tokens(self) -> list[Token]:
        """Waits until the step is computed. Once: the memory behind it is used again."""
        super().tokens()
        ids: list[int] = self._host.tokens[: self._count].tolist()
        if not self._tops:
            return plain_tokens(ids)
        top = 1 + max(self._tops)
        values = self._host.values[: len(ids), :top].tolist()
        likely = self._host.ids[: len(ids), :top].tolist()
        return [_told(*row) for row in zip(ids, values, likely, self._tops, strict=True)]


class _Host:
    """Pinned memory that results come to."""

    def __init__(self, tokens: Tensor, pinned: bool) -> None:
        """`tokens`: int64 [rows], where a kernel writes them."""
        rows = len(tokens)
        self.tokens: npt.NDArray[np.int64] = tokens.numpy()
        self.values = torch.zeros(rows, 1 + MAX_TOP, dtype=torch.float32, pin_memory=pinned)
        self.ids = torch.zeros(rows, 1 + MAX_TOP, dtype=torch.int64, pin_memory=pinned)
        self.event = new_event() if pinned else None


class Draws:
    """The sampler: kernels for what most requests ask for, `engine/sampler.py` for the rest (rules, typical-p)."""

    def __init__(
        self,
        rows: int,
        vocab: int,
        end_ids: Collection[int],
        last_tokens: Tensor,  # int64 [slots]: the token drawn last, by slot
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """For at most `rows` draws a step. `dtype`: of the logits."""
        device = last_tokens.device
        self._end_ids = end_ids
        self._last_tokens = last_tokens
        self._graphs = DrawGraphs()
        self._scratch = DrawScratch(rows, vocab, device)
        self._staging = Staging(16 * (rows + 16), device)
        self._masks = Staging(rows * (1 + -(-vocab // 32)) + 2 * ALIGNMENT, device)
        self._masked = torch.zeros(rows, vocab, dtype=dtype, device=device)  # logits under constraints
        self._tokens = torch.zeros(rows, dtype=torch.int64, device=device)
        self._values = torch.zeros(rows, 1 + MAX_TOP, dtype=torch.float32, device=device)
        self._ids = torch.zeros(rows, 1 + MAX_TOP, dtype=torch.int64, device=device)
        pinned = device.type == "cuda"
        self._told = torch.zeros(DEPTH + 1, rows, dtype=torch.int64, pin_memory=pinned)  # tokens, by turn
        self._hosts = [_Host(tokens, pinned) for tokens in self._told]
        self._spare = Turn(DEPTH, torch.full((1,), DEPTH, dtype=torch.int32, device=device))  # of those waited for

    def draw(
        self,
        logits: Tensor,
        columns: DrawColumns,
        positions: npt.NDArray[np.int32],
        slots: Tensor,  # int32 [draws], on the device
        turn: Turn,
        each: Callable[[], Sequence[Draw]],
        *,
        size: int = 0,
        wait: bool = False,
        allowed: Sequence[Allowed | None] = (),
    ) -> DrawnStep | list[Token]:
        """`logits`: [draws, vocab]; `columns`, `positions` (of the tokens to be drawn), `slots`, `allowed` where one of
        them is constrained and, for the plain sampler, `each` tell of the same draws. `size`: of the captured step
        that they belong to; 0: to none. Keeps the tokens by slot for the next step, and returns what tells the host of
        them, which comes to `turn`: tokens at once with `wait`, or where the plain sampler had to wait.
        """
        tokens, kinds = self._tokens[: len(columns)], columns.kinds
        turn = self._spare if wait else turn
        if kinds & PLAIN:
            drawn = sample(logits, each(), self._end_ids)
            tokens.copy_(torch.tensor([token.token_id for token in drawn]))
            keep_tokens(self._last_tokens, slots, tokens, self._told, turn.sent)
            return drawn
        size = 0 if allowed else size
        params = self._params(columns, positions, size or len(columns)) if kinds & DRAWN else None
        if size:
            self._graphs.replay(size, params is not None)
        else:
            self._launch(self._mask(logits, allowed) if allowed else logits, params, tokens, slots, turn.sent)
        tops = columns.tops if kinds & TOLD else []
        drawn_step = self._send(logits, tokens, tops, self._hosts[turn.number])
        return drawn_step.tokens() if wait else drawn_step

    def capture(self, size: int, logits: Tensor, slots: Tensor, turn: Tensor) -> None:
        """Captures how the tokens of captured steps of that size are drawn. `logits`: [size, vocab]; `slots`: int32
        [size], `turn`: int32 [1]: where those steps have theirs.
        """
        params = self._params(DrawColumns.zeros(size), np.zeros(size, np.int32), size)
        tokens = self._tokens[:size]
        self._graphs.capture(size, False, lambda: self._launch(logits, None, tokens, slots, turn))
        self._graphs.capture(size, True, lambda: self._launch(logits, params, tokens, slots, turn))

    def _launch(self, logits: Tensor, params: DrawParams | None, tokens: Tensor, slots: Tensor, turn: Tensor) -> None:
        if params is None:
            draw_greedy(logits, tokens, self._scratch)
        else:
            draw(logits, params, tokens, self._scratch)
        keep_tokens(self._last_tokens, slots, tokens, self._told, turn)

    def _mask(self, logits: Tensor, allowed: Sequence[Allowed | None]) -> Tensor:
        masks = [mask for mask in allowed if mask is not None]
        places = np.full(len(allowed), -1, np.int32)
        places[[mask is not None for mask in allowed]] = np.arange(len(masks))
        words = np.concatenate(masks) if masks else np.empty(0, np.int32)
        sent = self._masks.send([places, words], [len(places), len(words)])
        masked = self._masked[: len(logits)]
        mask_logits(logits, sent[0], sent[1], masked)
        return masked

    def _send(self, logits: Tensor, tokens: Tensor, tops: Sequence[int], host: "_Host") -> DrawnStep:
        count = len(tokens)
        if tops:
            top = 1 + max(tops)
            values, ids = self._values[:count, :top], self._ids[:count, :top]
            logprobs(logits, tokens, top - 1, values, ids, self._scratch)
            # Whole rows: a copy that is not contiguous goes through memory that is not pinned, and waits.
            host.values[:count].copy_(self._values[:count], non_blocking=True)
            host.ids[:count].copy_(self._ids[:count], non_blocking=True)
        if host.event is not None:
            host.event.record()
        return DrawnStep(host.event, count, host, tops)

    def _params(self, columns: DrawColumns, positions: npt.NDArray[np.int32], rows: int) -> DrawParams:
        """`rows`: draws and padding, which is greedy. Where it lies depends on `rows` only."""
        parts = [*columns.wide.view(np.int32), *columns.narrow[:3], positions]
        sent = self._staging.send(parts, [2 * rows] * len(columns.wide) + [rows] * 4)
        return DrawParams(
            top_p=sent[0].view(torch.float64),
            min_p=sent[1].view(torch.float64),
            seed=sent[2].view(torch.int64),
            temperature=sent[3].view(torch.float32),
            top_k=sent[4],
            sample=sent[5],
            position=sent[6],
        )


def _told(token: int, values: list[float], ids: list[int], count: int) -> Token:
    if count < 0 or token == NO_TOKEN:
        return Token(token)
    return Token(token, ((token, values[0]), *zip(ids[1 : count + 1], values[1 : count + 1], strict=True)))
