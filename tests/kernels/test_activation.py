import pytest
import torch

from twostroke.kernels.activation import silu_mul
from twostroke.kernels.tolerances import TOLERANCES


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "inner"), [(0, 8), (1, 1), (3, 1536), (33, 100)])
def test_equals_the_formula(rows, inner, dtype):
    generator = torch.Generator().manual_seed(inner)
    gate_up = (torch.randn(rows, 2 * inner, generator=generator) * 3).to(dtype)
    gate, up = gate_up.double()[:, :inner], gate_up.double()[:, inner:]
    result = silu_mul(gate_up)
    assert result.shape == (rows, inner)
    assert result.is_contiguous()
    relative, absolute = TOLERANCES[dtype]
    torch.testing.assert_close(result.double(), gate / (1 + (-gate).exp()) * up, rtol=relative, atol=absolute)
