import pytest
import torch

from twostroke.kernels.activation import gelu_tanh_mul, silu_mul, soft_cap
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "inner"), [(0, 8), (1, 1), (3, 1536), (33, 100)])
def test_gelu_equals_the_formula(rows, inner, dtype):
    generator = torch.Generator().manual_seed(inner)
    gate_up = (torch.randn(rows, 2 * inner, generator=generator) * 3).to(dtype)
    gate, up = gate_up.double()[:, :inner], gate_up.double()[:, inner:]
    result = gelu_tanh_mul(gate_up)
    assert result.shape == (rows, inner)
    expected = gate / 2 * (1 + ((2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3)).tanh()) * up
    relative, absolute = TOLERANCES[dtype]
    torch.testing.assert_close(result.double(), expected, rtol=relative, atol=absolute)


def test_soft_cap_bounds_and_keeps_the_order():
    x = torch.tensor([-1e9, -30.0, -1.0, 0.0, 0.5, 30.0, 1e9])
    result = soft_cap(x, 30.0)
    torch.testing.assert_close(result, 30 * (x / 30).tanh())
    assert result.abs().max() <= 30
    assert x[2] == -1.0
    half = soft_cap(x[1:6].to(torch.bfloat16), 30.0)
    assert half.dtype == torch.float32
    torch.testing.assert_close(half, result[1:6], rtol=1e-2, atol=1e-2)
