"""A step's intermediate results: allocated once, in the shapes that the memory plan counted."""

import torch
from torch import Tensor

from ..config import EngineOptions
from ..model_config import ModelConfig
from ..scoring import HEAD_ROWS


class Buffers:
    """Rows are tokens; each step uses the first ones. Nothing else is allocated while serving."""

    def __init__(self, config: ModelConfig, options: EngineOptions, dtype: torch.dtype, device: torch.device) -> None:
        """For steps of `token_budget` tokens, at most `max_batch` of which are sampled at once."""
        tokens, rows = options.token_budget, options.max_batch
        width, inner = config.hidden_size, config.intermediate_size
        self._q_width = config.heads * config.head_dim

        def empty(count: int, columns: int, kind: torch.dtype = dtype) -> Tensor:
            return torch.empty(count, columns, dtype=kind, device=device)

        self.hidden = empty(tokens, width, torch.float32)  # the residual stream
        self.normed = empty(tokens, width)
        self.qkv = empty(tokens, self._q_width + 2 * config.kv_heads * config.head_dim)
        # Padding rows may be left unwritten: what they hold must be no NaN.
        self.attended = empty(tokens, self._q_width).zero_()
        self.projected = empty(tokens, width)  # what attention and MLP add to the stream
        self.gate_up = empty(tokens, 2 * inner)
        self._activated = empty(tokens, max(inner, self._q_width))
        self._inner = inner
        self.logits = empty(max(rows, HEAD_ROWS), config.vocab_size)

    def activated(self, rows: int) -> Tensor:
        """[rows, inner], contiguous."""
        return self._activated.view(-1)[: rows * self._inner].view(rows, self._inner)

    def picked(self, rows: int) -> Tensor:
        """[rows, heads * head_dim], contiguous; shares memory with `activated`."""
        return self._activated.view(-1)[: rows * self._q_width].view(rows, self._q_width)

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return sum(tensor.nbytes for tensor in vars(self).values() if isinstance(tensor, Tensor))
