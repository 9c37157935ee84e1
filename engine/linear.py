"""A matrix of the model, laid out for the device that it is on."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

# Rows the layout is chosen for. With any hint from 16 up oneDNN packs the same layout, good from 1 row to 512.
PACK_ROWS = 512


class Linear:
    """y = x W^T + b.

    On a CPU the weight is packed once for oneDNN, which spares `linear` a re-packing per call: 1.3 to 2.5 times faster.
    Where this build of torch or this CPU cannot pack the type, and on a GPU, it is `torch.nn.functional.linear`.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """`weight`: [out, in]; `bias`: [out]. The weight itself is dropped once packed."""
        self.out_features, self.in_features = weight.shape
        self.bias = bias
        packed = _pack(weight, bias)
        self._packed = packed is not None
        self._weight = weight if packed is None else packed
        self._pointwise: Any = torch.ops.mkldnn._linear_pointwise.default if self._packed else None

    @property
    def packed(self) -> bool:
        """Whether the weight lies in oneDNN's own layout."""
        return self._packed

    def weight(self) -> Tensor:
        """[out, in], as it was given; where it is packed, a copy."""
        return self._weight.to_dense() if self._packed else self._weight

    def __call__(self, x: Tensor) -> Tensor:
        """`x`: [rows, in], contiguous -> [rows, out], in x's dtype."""
        if self._packed and x.shape[0]:
            result: Tensor = self._pointwise(x, self._weight, self.bias, "none", [], "")
            return result
        if self._packed:
            return x.new_empty(0, self.out_features)
        return functional.linear(x, self._weight, self.bias)


def _pack(weight: Tensor, bias: Tensor | None) -> Tensor | None:
    """The packed weight [out, in], or None where packing or running it fails (no oneDNN, no fp16 on this CPU, ...)."""
    if weight.device.type != "cpu":
        return None
    try:
        packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, PACK_ROWS)
        torch.ops.mkldnn._linear_pointwise(weight.new_zeros(1, weight.shape[1]), packed, bias, "none", [], "")
    except (AttributeError, RuntimeError, NotImplementedError):
        return None
    return packed
