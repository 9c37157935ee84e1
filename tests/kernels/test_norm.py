import pytest
import torch

from twostroke.kernels.norm import head_norm_, rms_norm
from twostroke.kernels.tolerances import TOLERANCES


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "width"), [(0, 64), (1, 64), (3, 576), (17, 80), (2, 1)])
def test_equals_the_formula(rows, width, dtype):
    generator = torch.Generator().manual_seed(width)
    x = torch.randn(rows, width, generator=generator) * 30
    weight = torch.randn(width, generator=generator)
    result = rms_norm(x, weight, 1e-5, dtype)
    assert result.dtype == dtype
    x64 = x.double()
    expected = x64 / (x64.square().mean(dim=1, keepdim=True) + 1e-5).sqrt() * weight.double()
    relative, absolute = TOLERANCES[dtype]
    torch.testing.assert_close(result.double(), expected, rtol=relative, atol=absolute)


def test_zeros_and_huge_values_stay_finite():
    weight = torch.ones(64)
    assert torch.equal(rms_norm(torch.zeros(2, 64), weight, 1e-6, torch.float32), torch.zeros(2, 64))
    assert rms_norm(torch.full((1, 64), 1e15), weight, 1e-6, torch.bfloat16).tolist() == [[1.0] * 64]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("tokens", "heads", "head_dim"), [(0, 2, 8), (1, 1, 64), (5, 6, 80)])
def test_heads_are_normalised_in_place_and_one_by_one(tokens, heads, head_dim, dtype):
    generator = torch.Generator().manual_seed(tokens)
    block = (torch.randn(tokens, heads + 2, head_dim, generator=generator) * 3).to(dtype)
    before, weight = block.clone(), torch.randn(heads, head_dim, generator=generator)
    head_norm_(block[:, :heads], weight, 1e-6)
    relative, absolute = TOLERANCES[dtype]
    for head in range(heads):
        expected = rms_norm(before[:, head].float(), weight[head], 1e-6, torch.float32)
        torch.testing.assert_close(block[:, head].float(), expected, rtol=relative, atol=absolute)
    assert torch.equal(block[:, heads:], before[:, heads:])
