"""Drawing a step's tokens on the device, and bringing them to the host without holding up the next step."""

import time
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ...kernels.gpu.draw import DrawParams, DrawScratch, draw, draw_greedy
from ...kernels.gpu.logprobs import logprobs
from ..request import NO_TOKEN, SamplingParams, Token
from ..sampler import Draw, sample, signed
from .staging import DEPTH, Staging, new_event

MAX_TOP = 20  # log-probabilities beside the token's own that are computed on the way; more: by the plain sampler


class DrawnStep:
    """Tokens on their way to the host. Implements `batch.Launched`."""

    def __init__(self, event: "torch.cuda.Event | None", draws: Sequence[Draw], host: "_Host", top: int) -> None:
        self.waited_s = 0.0  # how long the host waited for the device
        self.event = event
        self._draws = draws
        self._host = host
        self._top = top

    def tokens(self) -> list[Token]:
        """Waits until the step is computed. Once: the memory behind it is used again."""
        if self.event is not None:
            began = time.perf_counter()
            self.event.synchronize()
            self.waited_s = time.perf_counter() - began
        ids = self._host.tokens[: len(self._draws)].tolist()
        if not self._top:
            return [Token(token) for token in ids]
        values = self._host.values[: len(ids), : self._top].tolist()
        top = self._host.ids[: len(ids), : self._top].tolist()
        return [_told(*row) for row in zip(ids, values, top, self._draws, strict=True)]


class Silent:
    """A step on its way that draws nothing. Implements `batch.Launched`."""

    def __init__(self, event: "torch.cuda.Event | None") -> None:
        self.waited_s = 0.0
        self.event = event

    def tokens(self) -> list[Token]:
        """Waits until the step is computed."""
        if self.event is not None:
            began = time.perf_counter()
            self.event.synchronize()
            self.waited_s = time.perf_counter() - began
        return []


class _Host:
    """Pinned memory that results are copied to."""

    def __init__(self, rows: int, pinned: bool) -> None:
        self.tokens = torch.zeros(rows, dtype=torch.int64, pin_memory=pinned)
        self.values = torch.zeros(rows, 1 + MAX_TOP, dtype=torch.float32, pin_memory=pinned)
        self.ids = torch.zeros(rows, 1 + MAX_TOP, dtype=torch.int64, pin_memory=pinned)
        self.event = new_event() if pinned else None


class Draws:
    """The sampler: kernels for what most requests ask for, `engine/sampler.py` for the rest (rules, typical-p)."""

    def __init__(self, rows: int, vocab: int, end_ids: Collection[int], device: torch.device) -> None:
        """For at most `rows` draws a step."""
        self._end_ids = end_ids
        self._scratch = DrawScratch(rows, vocab, device)
        self._staging = Staging(16 * (rows + 16), device)
        self._tokens = torch.zeros(rows, dtype=torch.int64, device=device)
        self._values = torch.zeros(rows, 1 + MAX_TOP, dtype=torch.float32, device=device)
        self._ids = torch.zeros(rows, 1 + MAX_TOP, dtype=torch.int64, device=device)
        self._hosts = [_Host(rows, device.type == "cuda") for _ in range(DEPTH)]
        self._spare = _Host(rows, device.type == "cuda")  # of draws that are waited for
        self._turn = 0

    def draw(
        self, logits: Tensor, draws: Sequence[Draw], *, wait: bool = False
    ) -> tuple[Tensor, DrawnStep | list[Token]]:
        """`logits`: [len(draws), vocab]. Returns the tokens on the device, int64 [len(draws)], valid until the next
        call, and what tells the host of them: tokens at once with `wait`, or where the plain sampler had to wait.
        """
        tokens = self._tokens[: len(draws)]
        if any(_plain(one) for one in draws):
            drawn = sample(logits, draws, self._end_ids)
            tokens.copy_(torch.tensor([token.token_id for token in drawn]))
            return tokens, drawn
        if all(one.params.temperature == 0.0 for one in draws):
            draw_greedy(logits, tokens, self._scratch)
        else:
            draw(logits, self._params(draws), tokens, self._scratch)
        if wait:
            return tokens, self._send(logits, tokens, draws, self._spare).tokens()
        self._turn = (self._turn + 1) % DEPTH
        return tokens, self._send(logits, tokens, draws, self._hosts[self._turn])

    def _send(self, logits: Tensor, tokens: Tensor, draws: Sequence[Draw], host: "_Host") -> DrawnStep:
        count = len(draws)
        host.tokens[:count].copy_(tokens, non_blocking=True)
        wanted = [k for one in draws if (k := one.params.logprobs) is not None]
        top = 1 + max(wanted) if wanted else 0
        if top:
            values, ids = self._values[:count, :top], self._ids[:count, :top]
            logprobs(logits, tokens, top - 1, values, ids, self._scratch)
            # Whole rows: a copy that is not contiguous goes through memory that is not pinned, and waits.
            host.values[:count].copy_(self._values[:count], non_blocking=True)
            host.ids[:count].copy_(self._ids[:count], non_blocking=True)
        if host.event is not None:
            host.event.record()
        return DrawnStep(host.event, draws, host, top)

    def _params(self, draws: Sequence[Draw]) -> DrawParams:
        params: list[SamplingParams] = [one.params for one in draws]
        rows = len(draws)
        wide: list[npt.NDArray[Any]] = [
            np.array([p.top_p for p in params], np.float64),
            np.array([p.min_p for p in params], np.float64),
            np.array([signed(p.seed) for p in params], np.int64),
        ]
        narrow: list[npt.NDArray[Any]] = [
            np.array([p.temperature for p in params], np.float32),
            np.array([p.top_k for p in params], np.int32),
            np.array([one.sample for one in draws], np.int32),
            np.array([one.position for one in draws], np.int32),
        ]
        parts = [array.view(np.int32) for array in (*wide, *narrow)]
        sent = self._staging.send(parts, [2 * rows] * len(wide) + [rows] * len(narrow))
        return DrawParams(
            top_p=sent[0].view(torch.float64),
            min_p=sent[1].view(torch.float64),
            seed=sent[2].view(torch.int64),
            temperature=sent[3].view(torch.float32),
            top_k=sent[4],
            sample=sent[5],
            position=sent[6],
        )


def _plain(one: Draw) -> bool:
    """Whether only the plain sampler can do it."""
    return one.rules is not None or one.params.typical_p < 1.0 or (one.params.logprobs or 0) > MAX_TOP


def _told(token: int, values: list[float], ids: list[int], one: Draw) -> Token:
    count = one.params.logprobs
    if count is None or token == NO_TOKEN:
        return Token(token)
    return Token(token, ((token, values[0]), *zip(ids[1 : count + 1], values[1 : count + 1], strict=True)))
