import pytest
import torch

from twostroke.engine.linear import Linear
from twostroke.kernels.tolerances import TOLERANCES


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("inner", "outer"), [(64, 96), (576, 960), (33, 7), (1, 1)])
def test_equals_the_product_for_any_number_of_rows(inner, outer, bias, dtype):
    generator = torch.Generator().manual_seed(outer)
    weight = (torch.randn(outer, inner, generator=generator) * inner**-0.5).to(dtype)
    offset = torch.randn(outer, generator=generator).to(dtype) if bias else None
    linear = Linear(weight.clone(), offset)
    relative, absolute = TOLERANCES[dtype]
    for rows in (0, 1, 2, 3, 15, 16, 17, 64, 130, 513):
        x = torch.randn(rows, inner, generator=generator).to(dtype)
        expected = x.double() @ weight.double().t() + (0 if offset is None else offset.double())
        result = linear(x)
        assert result.dtype == dtype
        torch.testing.assert_close(result.double(), expected, rtol=relative, atol=absolute)


def test_packing_is_used_where_it_works_and_done_without_elsewhere(monkeypatch):
    weight = torch.randn(8, 4)
    if torch.backends.mkldnn.is_available():
        assert Linear(weight).packed
    monkeypatch.setattr("twostroke.engine.linear._pack", lambda weight, bias: None)
    plain, x = Linear(weight), torch.randn(3, 4)
    assert not plain.packed
    torch.testing.assert_close(plain(x), x @ weight.t())
    assert plain(x[:0]).shape == (0, 8)


def test_sizes_are_told():
    linear = Linear(torch.zeros(5, 3))
    assert (linear.in_features, linear.out_features) == (3, 5)
